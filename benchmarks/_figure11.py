"""RollPacker's Figure 11 (arXiv 2509.21009, section 6.3): rollout time under redundancy of rollouts, prompts, and both.

The law of the answers' lengths has two constants, the same for 7B and 14B: the share at the limit, and how alike
answers to one prompt are. They were searched for among the longest answers alone (`_figure11_search.py`). Of each model
two times are fitted: seconds that every round takes whatever its answers, and a factor on the simulated ones. Six bars
of each model are fitted; the two at 1.125 are not.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate

FITTED = ("base", "R 1.25", "R 1.5", "P 1.25", "P 1.5", "both 1.25")
PUBLISHED = {
    "tail-batching-7b": (82, 71, 54, 72, 60, 47, 77, 77),
    "tail-batching-14b": (277, 232, 115, 169, 143, 88, 260, 244),
    "tail-batching-32b": (673, 655, 265, 259, 279, 170, 658, 636),
}
"""Seconds: the bars of `CONFIGURATIONS`."""
AT_LIMIT = 0.014
CORRELATION = 0.2
SEEDS = (3000, 3001)
NUM_STEPS = {"base": 1, "R 1.25": 12, "R 1.5": 15, "P 1.25": 5, "P 1.5": 6, "both 1.25": 5, "R 1.125": 6, "P 1.125": 9}
"""Whole periods of short rounds and a long one, where prompts are redundant: of nine, five and three rounds. Where only
rollouts are, the hardest prompt decides, and one round differs from another by a third: so many of them."""
ROUND_SHARES = np.arange(0, 0.6, 0.005)[:, None]
"""Of the baseline's published time: candidates for the time of every round."""
PACES = np.arange(0.05, 2.2, 0.01)[None]
"""Candidates for the factor, where the baseline's simulated time is its published one."""


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


def figure11(name: str, config: SimulationConfig) -> dict[str, Any]:
    """Published and simulated seconds of each bar, and the constants."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        found = processes.map(partial(waited_s, config, seeds=SEEDS), CONFIGURATIONS)
        waited = dict(zip(CONFIGURATIONS, found, strict=True))
    published = dict(zip(CONFIGURATIONS, PUBLISHED[name], strict=True))
    round_s, pace = times([waited[what] for what in FITTED], [published[what] for what in FITTED])
    constants = {"at_limit": AT_LIMIT, "correlation": CORRELATION, "round_s": round_s, "pace": pace}
    bars = [
        {
            "what": what,
            "published": published[what],
            "waited_s": waited[what],
            "simulated": round_s + pace * waited[what],
            "fitted": what in FITTED,
        }
        for what in CONFIGURATIONS
    ]
    return {"constants": constants, "bars": bars, "num_seeds": len(SEEDS)}


def waited_s(config: SimulationConfig, what: str, seeds: Sequence[int]) -> float:
    """Mean simulated seconds of a round, before the two times of a model are applied."""
    points = config.model_dump(mode="json")["answer_tokens"]["points"]
    changes = {
        "answer_correlation": CORRELATION,
        "answer_tokens.points": [*points[:-1], [1 - AT_LIMIT, points[-1][1]]],
        "training.duration": {"type": "fixed", "value": 0},
        "training.sync_s": 0,
        "variants": {},
        "num_steps": NUM_STEPS[what],
    }
    changed = config.with_changes(changes | CONFIGURATIONS[what])
    return statistics.fmean(step.wait_s for seed in seeds for step in simulate(changed, seed=seed).steps)


def times(waited: Sequence[float], published: Sequence[float]) -> tuple[float, float]:
    """Seconds of every round and the factor on the others that leave the least greatest relative error.

    Args:
        waited: one for each bar, in any unit; the first is the baseline's.
        published: the same bars, in seconds.
    """
    scale = published[0] / waited[0]
    round_s, paces = ROUND_SHARES * published[0], PACES * scale
    worst = np.zeros(np.broadcast_shapes(round_s.shape, paces.shape))
    for seconds, bar in zip(waited, published, strict=True):
        worst = np.maximum(worst, np.abs((round_s + paces * seconds) / bar - 1))
    row, column = np.unravel_index(worst.argmin(), worst.shape)
    return float(round_s[row, 0]), float(paces[0, column])


def errors(bars: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The greatest relative errors: of the bars that were fitted, and of those that were not."""
    found = {True: 0.0, False: 0.0}
    for bar in bars:
        found[bar["fitted"]] = max(found[bar["fitted"]], abs(bar["simulated"] / bar["published"] - 1))
    return {"fitted": found[True], "predicted": found[False]}
