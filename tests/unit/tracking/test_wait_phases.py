"""A wait for rollouts is divided by what it is for, and the parts add up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.tracking.spans import Spans
from roll.tracking.wait_phases import WaitPhases
from roll.types import RolloutId


class World:
    """A clock that stands still unless told, and rollouts that move."""

    def __init__(self, path: Path | None = None) -> None:
        self.now = 100.0
        self.shown: list[str] = []
        self.spans = Spans(path, clock=lambda: self.now, on_phase=self.shown.append)
        self.wait_phases = WaitPhases(self.spans)
        self._where: dict[str, str] = {}

    def move(self, *names: str, to: str, purpose: str = "train") -> None:
        for name in names:
            before = self._where.get(name)
            self._where[name] = to
            rollout_id = RolloutId(purpose=purpose, draw_id=hash(name), index=0)
            self.wait_phases.on_transition(SimpleNamespace(rollout_id=rollout_id, before=before, after=to))

    def act(self, seconds: float, number: int = 1) -> None:
        for _ in range(number):
            self.wait_phases.record_environment_activity(1)
        self.now += seconds
        for _ in range(number):
            self.wait_phases.record_environment_activity(-1)


@pytest.fixture
def world() -> World:
    return World()


def test_tracking_wait_phase_the_reward_holds_a_step_back_where_every_answer_waits_for_it(world: World) -> None:
    with world.spans.step(1):
        with world.wait_phases.measure_wait("generate"):
            world.move("a", "b", to="queued")
            world.now += 1
            world.move("a", "b", to="generating")
            world.now += 2
            world.move("a", to="rewarding")
            world.now += 4  # b still writes
            world.move("b", to="rewarding")
            world.now += 8
            world.move("a", to="accepted")
            world.now += 16
            world.move("b", to="accepted")
        metrics = world.spans.get_metrics()
        assert world.spans.find_bottleneck() == "reward"
    assert metrics == {"time/generate_s": 7, "time/reward_s": 24, "time/step_s": 31}
    assert world.shown == ["generate", "reward", "generate", ""]


def test_tracking_wait_phase_waiting_to_be_scored_again_is_the_rewards_time(world: World) -> None:
    with world.spans.step(1):
        with world.wait_phases.measure_wait("wait"):
            for state in ("queued", "generating", "rewarding"):
                world.move("a", to=state)
            world.now += 1
            world.move("a", to="queued")
            world.now += 2  # the pause before another attempt
            world.move("a", to="generating")
            world.move("a", to="rewarding")
            world.now += 4
            world.move("a", to="infra_error")
        metrics = world.spans.get_metrics()
    assert metrics == {"time/wait_s": 0, "time/reward_s": 7, "time/step_s": 7}


def test_tracking_wait_phase_environments_hold_a_step_back_where_the_model_writes_for_nobody(world: World) -> None:
    with world.spans.step(1):
        world.act(5)  # beside the wait: no part of it
        with world.wait_phases.measure_wait("generate"):
            world.move("a", "b", to="generating")
            world.now += 1
            world.act(7)  # the model still writes for the other one
            world.act(2, number=2)
            world.move("a", to="rewarding")
            world.act(3)  # the other one's verdict comes beside it
            world.now += 1
        metrics = world.spans.get_metrics()
        assert world.spans.find_bottleneck() == "generate"
    assert metrics == {"time/generate_s": 9, "time/environment_s": 5, "time/step_s": 19}


def test_tracking_wait_phase_rollouts_of_an_evaluation_are_not_waited_for(world: World) -> None:
    with world.spans.step(1):
        world.move("a", to="rewarding")
        world.move("e", to="generating", purpose="eval")
        with world.wait_phases.measure_wait("wait"):
            world.now += 1
        assert world.spans.get_metrics()["time/reward_s"] == 1


def test_tracking_wait_phase_the_stages_are_in_the_trace_and_what_is_inside_them_is_no_phase(tmp_path: Path) -> None:
    world = World(tmp_path / "trace.json")
    with world.spans.step(1), world.wait_phases.measure_wait("generate"):
        world.now += 1
        world.act(2)
        with world.spans.phase("inner"):
            world.move("a", to="rewarding")
            world.now += 4
        assert list(world.spans.get_phases()) == ["generate", "environment", "reward"]
    world.spans.close()
    events = [e for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X"]
    assert [(e["name"], e["dur"] / 1e6) for e in events] == [
        ("generate", 1), ("environment", 2), ("generate", 0), ("inner", 4), ("reward", 4), ("step 1", 7)
    ]  # fmt: skip
