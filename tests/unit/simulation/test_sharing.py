"""Simulated runs whose engines and trainer share devices by a rule."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.simulation import SimulationConfig
from roll.simulation.run import SimulatedRun, simulate

pytestmark = pytest.mark.integration

WORKLOAD: dict[str, Any] = {
    "name": "sharing",
    "num_steps": 6,
    "warmup_steps": 2,
    "model": "qwen2.5-7b",
    "device": "h800",
    "engine": {"max_num_seqs": 32},
    "rollout": {"prompts_per_step": 64, "group_size": 4, "max_new_tokens": 4096},
    "answer_tokens": {"type": "quantiles", "points": [[0.5, 500], [0.75, 900], [0.999, 4096]], "max": 4096},
}


def build(placement: dict[str, Any], async_ratio: float = 0.0, **training: Any) -> SimulationConfig:
    rollout = {**WORKLOAD["rollout"], "scheduling": {"async_ratio": async_ratio}}
    return SimulationConfig.model_validate(
        {
            **WORKLOAD,
            "placement": placement,
            "rollout": rollout,
            "training": {"passes": 5, "efficiency": 0.1, **training},
        }
    )


def test_sharing_simulation_of_colocated_devices_adds_the_switch_to_every_step() -> None:
    plain = simulate(build({"generation": 8})).step_s
    switched = simulate(build({"generation": 8, "sharing": "colocated", "switch_s": 6.0})).step_s
    assert switched - plain == pytest.approx(6.0, abs=0.5)


@pytest.mark.parametrize("rule", ["partial_overlap", "elastic_overlap"])
def test_sharing_simulation_uses_idle_trainers_for_generation(rule: str) -> None:
    place = {"generation": 8, "training": 6, "sharing": rule, "switch_s": 2.0}
    # Training takes a fraction of the time of generation, so a fixed split waits for data.
    split = simulate(build({"generation": 2, "training": 6}, async_ratio=1.0, efficiency=0.4))
    shared = simulate(build(place, async_ratio=1.0, efficiency=0.4))
    assert shared.step_s < 0.95 * split.step_s
    tokens = [sum(step.num_tokens for step in run.steps) for run in (shared, split)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.01)
    assert max(step.max_staleness for step in shared.steps) <= 1


def test_sharing_simulation_keeps_the_devices_if_a_switch_takes_longer_than_it_saves() -> None:
    split = simulate(build({"generation": 6, "training": 2}, async_ratio=2.0))
    place = {"generation": 8, "training": 2, "sharing": "elastic_overlap", "switch_s": 600.0}
    # The first switch must be measured; afterwards the trainer keeps its devices, as in a fixed split.
    assert simulate(build(place, async_ratio=2.0)).step_s == pytest.approx(split.step_s, rel=0.02)


RULES: dict[str, tuple[dict[str, Any], float]] = {
    "colocated": ({"generation": 4, "sharing": "colocated", "switch_s": 4.0}, 0.0),
    "colocated, asynchronous": ({"generation": 4, "sharing": "colocated", "switch_s": 4.0}, 1.0),
    "partial_overlap": ({"generation": 4, "training": 2, "sharing": "partial_overlap", "switch_s": 4.0}, 1.0),
    "elastic_overlap": ({"generation": 4, "training": 2, "sharing": "elastic_overlap", "switch_s": 4.0}, 1.0),
    "stream_training": ({"generation": 4, "training": 2, "sharing": "stream_training", "switch_s": 4.0}, 0.0),
}


def fail(rule: str, *failures: dict[str, Any]) -> SimulatedRun:
    """Simulate a short run under a rule, in which engines fail."""
    place, async_ratio = RULES[rule]
    tree = build(place, async_ratio, sync_s=2.0).model_dump(mode="json")
    tree["rollout"] |= {"prompts_per_step": 16, "max_new_tokens": 1024}
    tree |= {"num_steps": 4, "warmup_steps": 0, "answer_tokens": {"type": "uniform", "low": 64, "high": 1024}}
    tree["engine"] |= {"restart_s": 50.0}
    return simulate(SimulationConfig.model_validate(tree | {"failures": list(failures)}))


def list_tokens(run: SimulatedRun) -> list[int]:
    return [step.num_tokens for step in run.steps]


def total_s(run: SimulatedRun) -> float:
    return sum(step.total_s for step in run.steps)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", [0, 3])
def test_sharing_simulation_of_engines_that_fail_trains_on_as_much(rule: str, engine: int) -> None:
    quiet = fail(rule)
    began_s, second = quiet.steps[0].total_s, quiet.steps[1]
    for moment in (0.3, 0.9):
        at_s = began_s + moment * second.total_s
        died = fail(rule, {"at_s": at_s, "engine": engine})
        # The engine hangs in the phase of the switch that begins while it stalls, and is replaced.
        stalled = fail(rule, {"type": "stall", "at_s": at_s, "engine": engine, "duration_s": 3600.0})
        for run in (died, stalled):
            assert sum(list_tokens(run)) == pytest.approx(sum(list_tokens(quiet)), rel=0.01)
            assert max(step.max_staleness for step in run.steps) <= RULES[rule][1]
        assert total_s(quiet) - 1.0 <= total_s(died) <= total_s(quiet) + 60.0 + second.total_s


def test_sharing_simulation_replaces_engines_that_died_asleep_when_they_should_wake() -> None:
    quiet = fail("colocated")
    first = quiet.steps[0]
    asleep_s = first.total_s - first.sync_s - 2.0 - 1.0  # a second before the devices return to the engines
    died = fail("colocated", *({"at_s": asleep_s, "engine": index} for index in range(4)))
    # All start after the switch, and then get the weights that the weight sync could not send.
    assert total_s(died) - total_s(quiet) == pytest.approx(50.0, abs=0.5)
    assert list_tokens(died) == list_tokens(quiet)


def test_sharing_simulation_of_an_engine_that_stalls_asleep_takes_as_long() -> None:
    quiet = fail("colocated")
    first = quiet.steps[0]
    stall = {"type": "stall", "at_s": first.wait_s + 4.0, "engine": 0, "duration_s": 0.5 * first.train_s}
    assert total_s(fail("colocated", stall)) == total_s(quiet)


@pytest.mark.parametrize(
    ("placement", "async_ratio", "message"),
    [
        ({"generation": 8, "training": 8, "sharing": "partial_overlap"}, 1.0, "set training between 1 and 7"),
        ({"generation": 8, "training": 4, "sharing": "elastic_overlap"}, 0.0, "set sharing to stream_training"),
        ({"generation": 8}, 1.0, "set placement.training, or placement.sharing to colocated"),
    ],
)
def test_sharing_simulation_rejects_placements_without_the_rules_devices(
    placement: dict[str, Any], async_ratio: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(placement, async_ratio)
