"""RollPacker's Figure 11 (arXiv 2509.21009, section 6.3): rollout time under redundancy of rollouts, prompts, and both.

Four constants of each model are fitted: the share of answers at the limit, how alike answers to one prompt are, a time
that every round takes whatever its answers, and the engines' pace. Six bars are fitted; the bars at 1.125 are not.
"""

from __future__ import annotations

import statistics
from typing import Any

from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate

FITTED = ("base", "R 1.25", "R 1.5", "P 1.25", "P 1.5", "both 1.25")
PUBLISHED = {
    "tail-batching-7b": (82, 71, 54, 72, 60, 47, 77, 77),
    "tail-batching-14b": (277, 232, 115, 169, 143, 88, 260, 244),
}
"""Seconds: the bars of `CONFIGURATIONS`."""
CONSTANTS = {
    "tail-batching-7b": {"at_limit": 0.03, "correlation": 0.35, "round_s": 30.8, "pace": 0.56},
    "tail-batching-14b": {"at_limit": 0.02, "correlation": 0.6, "round_s": 20.8, "pace": 0.92},
}
SEED = 3000
NUM_STEPS = {"base": 4, "R 1.25": 4, "R 1.5": 4, "R 1.125": 4, "P 1.125": 18}
PERIODS = 15
"""Steps of the others: three periods of five rounds, five of three."""


def _redundancy(rollouts: float, prompts: float) -> dict[str, Any]:
    kind = {"type": "tail_batching"} if prompts > 1 else {"type": "queue", "choose": "first_finished"}
    fields = kind | {"rollout_redundancy": rollouts, "prompt_redundancy": prompts}
    return {f"rollout.scheduling.{key}": value for key, value in fields.items()}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "base": {"rollout.scheduling.type": "batch"},
    "R 1.25": _redundancy(1.25, 1.0),
    "R 1.5": _redundancy(1.5, 1.0),
    "P 1.25": _redundancy(1.0, 1.25),
    "P 1.5": _redundancy(1.0, 1.5),
    "both 1.25": _redundancy(1.25, 1.25),
    "R 1.125": _redundancy(1.125, 1.0),
    "P 1.125": _redundancy(1.0, 1.125),
}


def figure11(name: str, config: SimulationConfig) -> list[dict[str, Any]]:
    """Published and simulated seconds of each bar."""
    constants = CONSTANTS[name]
    points = config.model_dump(mode="json")["answer_tokens"]["points"]
    supposed = {
        "answer_correlation": constants["correlation"],
        "answer_tokens.points": [*points[:-1], [1 - constants["at_limit"], points[-1][1]]],
        "training.duration": {"type": "fixed", "value": 0},
        "training.sync_s": 0,
        "variants": {},
    }
    found = []
    for (what, changes), published in zip(CONFIGURATIONS.items(), PUBLISHED[name], strict=True):
        changed = config.changed(supposed | changes | {"num_steps": NUM_STEPS.get(what, PERIODS)})
        waited = statistics.fmean(step.wait_s for step in simulate(changed, seed=SEED).steps)
        seconds = constants["round_s"] + constants["pace"] * waited
        found.append({"what": what, "published": published, "simulated": seconds, "fitted": what in FITTED})
    return found
