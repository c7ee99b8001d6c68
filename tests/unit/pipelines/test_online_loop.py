"""The one online loop, driven by stand-ins of run, trainer and engines in virtual time: what follows what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from roll.pipelines.online.loop import train
from roll.pipelines.online.protocols import CollectedBatch, UpdateOutcome
from roll.simulation import clock


class Engines:
    """Take a second for new weights."""

    def __init__(self, log: list[tuple[float, str]]) -> None:
        self.log = log

    def say(self, what: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), what))

    async def wake(self) -> None:
        self.say("wake")

    @asynccontextmanager
    async def enter_training(self) -> AsyncIterator[None]:
        self.say("learning")
        yield
        self.say("learned")

    async def push(self) -> dict[str, float]:
        await asyncio.sleep(1.0)
        self.say("pushed")
        return {"sync/s": 1.0}


class Steps:
    """A run of given batches, each of which takes ten seconds."""

    def __init__(self, *batches: str) -> None:
        self.log: list[tuple[float, str]] = []
        self.policy_engines = Engines(self.log)
        self.say = self.policy_engines.say
        self.batches = list(batches)
        self.version = 0
        self.metrics: list[Any] = []

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[None]:
        self.say("begin")
        try:
            yield
        finally:
            self.say("end")

    async def run_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        while self.batches:
            if alarms := await step():
                raise RuntimeError("; ".join(alarms))

    async def next_batch(self) -> Any:
        await asyncio.sleep(10.0)
        return self.batches.pop(0)

    async def run_unless_stopped(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await coroutine

    def advance_policy_version(self) -> None:
        self.version += 1

    async def finish_step(
        self, collected: CollectedBatch[Any], update: UpdateOutcome, update_state: Callable[[], None]
    ) -> list[str]:
        update_state()
        self.say(f"boundary at version {self.version}")
        self.metrics.append(dict(update.metrics))
        return ["alarm"] if collected.choice == "bad" else []

    async def evaluate(self) -> None:
        self.say("evaluate")


class Objective:
    """Learns for five seconds; from a batch that is called `empty`, nothing."""

    def __init__(self, run: Steps) -> None:
        self.run = run

    async def collect(self, batch: Any) -> CollectedBatch[str]:
        found: Any = () if batch == "empty" else (batch,)
        return CollectedBatch(batch=batch, choice=batch, rollouts=found, draw_outcomes={})

    async def learn(self, collected: CollectedBatch[str]) -> UpdateOutcome:
        await asyncio.sleep(5.0)
        self.run.say(f"learn {collected.choice}")
        return UpdateOutcome(metrics={"loss": 0.5}, has_new_weights=collected.choice != "frozen")

    def update_state(self, collected: CollectedBatch[str]) -> None:
        self.run.say(f"note {collected.choice}")


def steps(*batches: str) -> Steps:
    run = Steps(*batches)
    clock.run(train(run, Objective(run)), seed=0)
    return run


def test_online_loop_collects_learns_syncs_and_crosses_the_boundary_before_it_evaluates() -> None:
    run = steps("one")
    assert run.log == [
        (0.0, "begin"), (0.0, "evaluate"), (0.0, "wake"), (10.0, "learning"), (15.0, "learn one"), (16.0, "pushed"),
        (16.0, "learned"), (16.0, "note one"), (16.0, "boundary at version 1"), (16.0, "evaluate"), (16.0, "end"),
    ]  # fmt: skip
    assert run.metrics == [{"loss": 0.5, "sync/s": 1.0}]


@pytest.mark.parametrize(("batch", "learned"), [("empty", []), ("frozen", ["learning", "learn frozen", "learned"])])
def test_online_loop_syncs_no_weights_that_did_not_move(batch: str, learned: list[str]) -> None:
    run = steps(batch)
    assert [what for _, what in run.log][3:-4] == learned
    assert run.version == 0 and run.metrics == [{"loss": 0.5} if learned else {}]


def test_online_loop_ends_with_an_alarm_after_the_step_was_finished() -> None:
    run = Steps("bad", "one")
    with pytest.raises(RuntimeError, match="alarm"):
        clock.run(train(run, Objective(run)), seed=0)
    assert [what for _, what in run.log][-4:] == ["note bad", "boundary at version 1", "evaluate", "end"]
