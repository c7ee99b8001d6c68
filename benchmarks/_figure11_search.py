"""Which law of lengths meets Figure 11, if a round takes a fixed time and one for each token of its longest answer.

A Monte Carlo of the longest answers alone: seconds where the simulator needs minutes, so that laws can be searched for.
Two families: `alike`, in which answers to one prompt share a part of their randomness, as in the simulator; and
`two kinds`, in which a fraction of the prompts is hard and each answer to a hard prompt reaches the limit with the same
probability. Left out is that long answers slow each other down.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from _figure11 import CONFIGURATIONS, FITTED, PUBLISHED, errors, times
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[Array, int, np.random.Generator], Array]
"""Lengths relative to the limit: of a uniform number for each prompt, so many answers."""

NUM_PROMPTS, GROUP_SIZE = 128, 8
MEDIAN, QUARTILE = 1 / 28, 1.59 / 28
"""Of an answer's length, relative to the limit: as in `examples/simulation/tail-batching-*.yaml`."""
PERIODS = 30
SEED = 0
SHARED = ("tail-batching-7b", "tail-batching-14b")
"""Models that have one law."""
AT_LIMITS = (0.004, 0.008, 0.012, 0.014, 0.016, 0.018, 0.02, 0.03)
CORRELATIONS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
HARD_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
HARD_AT_LIMIT = (0.05, 0.1, 0.15, 0.2, 0.3)

_NORMAL = NormalDist()
_SPREAD = math.log(QUARTILE / MEDIAN) / _NORMAL.inv_cdf(0.75)


def alike(at_limit: float, correlation: float) -> Draw:
    """One kind of prompts: the upper tail is straight on lognormal paper up to the limit."""
    upper = -math.log(QUARTILE) / (_NORMAL.inv_cdf(1 - at_limit) - _NORMAL.inv_cdf(0.75))

    def draw(prompts: Array, count: int, rng: np.random.Generator) -> Array:
        shared = np.vectorize(_NORMAL.inv_cdf)(prompts)[:, None]
        own = rng.standard_normal((len(prompts), count))
        z = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
        beyond = np.maximum(z - _NORMAL.inv_cdf(0.75), 0)
        below = math.log(MEDIAN) + _SPREAD * np.minimum(z, _NORMAL.inv_cdf(0.75))
        return np.minimum(np.exp(below + upper * beyond), 1)

    return draw


def two_kinds(hard_share: float, at_limit: float) -> Draw:
    """Answers to easy prompts are lognormal; some of those to hard ones reach the limit."""

    def draw(prompts: Array, count: int, rng: np.random.Generator) -> Array:
        shape = (len(prompts), count)
        easy = np.minimum(MEDIAN * np.exp(_SPREAD * rng.standard_normal(shape)), 1)
        return np.where((rng.random(shape) < at_limit) & (prompts < hard_share)[:, None], 1.0, easy)

    return draw


def longest(draw: Draw) -> list[float]:
    """The longest answer that a round waits for, on average over its period: for each of the bars."""
    rng = np.random.default_rng(SEED)
    found = []
    for changes in CONFIGURATIONS.values():
        more = changes.get("rollout.scheduling.rollout_redundancy", 1.0)
        spare = round((changes.get("rollout.scheduling.prompt_redundancy", 1.0) - 1) * NUM_PROMPTS)
        count = math.ceil(round(more * GROUP_SIZE, 9))
        found.append(float(np.mean([_period(draw, count, spare, rng) for _ in range(PERIODS)])))
    return found


def _period(draw: Draw, count: int, spare: int, rng: np.random.Generator) -> float:
    if not spare:
        return float(_ends(draw(rng.random(NUM_PROMPTS), count, rng)).max())
    rounds, deferred = [], []
    for _ in range(NUM_PROMPTS // spare):
        prompts = rng.random(NUM_PROMPTS + spare)
        ends = _ends(draw(prompts, count, rng))
        order = ends.argsort()
        rounds.append(float(ends[order[NUM_PROMPTS - 1]]))
        deferred.append(prompts[order[NUM_PROMPTS:]])
    rounds.append(float(_ends(draw(np.concatenate(deferred), GROUP_SIZE, rng)).max()))
    return sum(rounds) / len(rounds)


def _ends(lengths: Array) -> Array:
    """The answer that completes each group."""
    return np.sort(lengths, axis=-1)[:, GROUP_SIZE - 1]


def candidates() -> Iterator[tuple[str, tuple[float, float], Draw]]:
    """Every law of both families."""
    for constants in itertools.product(AT_LIMITS, CORRELATIONS):
        yield "alike", constants, alike(*constants)
    for constants in itertools.product(HARD_SHARES, HARD_AT_LIMIT):
        yield "two kinds", constants, two_kinds(*constants)


@functools.cache
def search() -> list[dict[str, Any]]:
    """For every law and model: its greatest errors, with the model's two times fitted."""
    found = []
    for family, constants, draw in candidates():
        lengths = longest(draw)
        for name, published in PUBLISHED.items():
            of = errors(bars(lengths, published))
            found.append({"family": family, "constants": constants, "model": name, **of})
    return found


def searched(model: str) -> dict[str, Any]:
    """What the page says of the search: this model's best laws, and the best one for `SHARED`."""
    laws = {family: best(family, (model,)) for family in ("alike", "two kinds")}
    return laws | {"shared": best("alike", SHARED), "laws": len(AT_LIMITS) * len(CORRELATIONS)}


def bars(lengths: list[float], published: tuple[float, ...]) -> list[dict[str, Any]]:
    """As `figure11` gives them."""
    round_s, pace = times(lengths[: len(FITTED)], published[: len(FITTED)])
    return [
        {"published": bar, "simulated": round_s + pace * length, "fitted": what in FITTED}
        for what, length, bar in zip(CONFIGURATIONS, lengths, published, strict=True)
    ]


def best(family: str, models: tuple[str, ...]) -> dict[str, Any]:
    """The law of a family whose greatest error over the fitted bars of these models is least."""
    by_law: dict[tuple[float, float], dict[str, float]] = {}
    for entry in search():
        if entry["family"] == family and entry["model"] in models:
            worst = by_law.setdefault(entry["constants"], {"fitted": 0.0, "predicted": 0.0})
            for kind in worst:
                worst[kind] = max(worst[kind], entry[kind])
    constants = min(by_law, key=lambda law: by_law[law]["fitted"])
    return {"constants": list(constants), **by_law[constants]}
