"""Simulated runs whose engines and trainer share devices by a rule."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate

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


@pytest.mark.parametrize(
    ("placement", "async_ratio", "message"),
    [
        ({"generation": 8, "training": 8, "sharing": "partial_overlap"}, 1.0, "set training between 1 and 7"),
        ({"generation": 8, "training": 4, "sharing": "elastic_overlap"}, 0.0, "set sharing to stream_training"),
        ({"generation": 8, "training": 4, "sharing": "colocated"}, 0.0, "set training to 0 for colocated"),
        ({"generation": 8}, 1.0, "set placement.training, or placement.sharing to colocated"),
    ],
)
def test_sharing_simulation_rejects_placements_without_the_rules_devices(
    placement: dict[str, Any], async_ratio: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(placement, async_ratio)
