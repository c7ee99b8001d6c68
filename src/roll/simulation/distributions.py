"""Random quantities as functions of a key: the same key gives the same number, whoever asks, whenever, in any order.

    key (integers) ──hash──► u in (0, 1) ──► quantile function ──► value

So a rollout's length does not depend on which engine serves it, and a re-issued request gets what it would have got.
A part of the randomness may be shared (`correlation`): rollouts of one prompt resemble each other.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import TypeAlias

__all__ = [
    "Quantile",
    "clipped",
    "correlated",
    "empirical",
    "fixed",
    "lognormal",
    "lognormal_of_quartile",
    "mix",
    "normal",
    "pareto",
    "uniform",
    "uniform_of",
    "with_quantiles",
]

Quantile: TypeAlias = Callable[[float], float]
"""From a probability in (0, 1) to the value below which that share of draws lies."""

_MASK = (1 << 64) - 1
_STANDARD = NormalDist()
Z_UPPER_QUARTILE = _STANDARD.inv_cdf(0.75)


def mix(*key: int) -> int:
    """64 well-mixed bits of a key (SplitMix64's finaliser, applied to each part in turn)."""
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = (state + (part & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform_of(*key: int) -> float:
    """A number in (0, 1), never 0 or 1."""
    return ((mix(*key) >> 11) + 0.5) / (1 << 53)


def correlated(shared: float, own: float, correlation: float) -> float:
    """Combine two uniform numbers into one that is uniform again.

    Args:
        shared: what several draws have in common, in (0, 1).
        own: this draw's, in (0, 1).
        correlation: of the underlying normal variables of two draws with the same `shared`, 0 … 1.
    """
    if correlation == 0:
        return own
    if correlation == 1:
        return shared
    z = math.sqrt(correlation) * _STANDARD.inv_cdf(shared) + math.sqrt(1 - correlation) * _STANDARD.inv_cdf(own)
    return min(max(_STANDARD.cdf(z), 1e-15), 1 - 1e-15)


def fixed(value: float) -> Quantile:
    """Always the same."""
    return lambda u: value


def uniform(low: float, high: float) -> Quantile:
    """Any value between two, all alike."""
    return lambda u: low + u * (high - low)


def normal(mean: float, std: float, *, redraw: bool = True) -> Quantile:
    """Normal and not negative: drawn again until it is (`redraw`), or 0 where it would be.

    Raises:
        ValueError: practically all of it is negative.
    """
    if std == 0:
        return fixed(max(mean, 0.0))
    law = NormalDist(mean, std)
    below = law.cdf(0.0) if redraw else 0.0
    if 1 - below < 1e-9:
        raise ValueError(f"normal(mean={mean:g}, std={std:g}) is never positive")
    tiny = 1e-15
    return lambda u: max(law.inv_cdf(min(max(below + u * (1 - below), tiny), 1 - tiny)), 0.0)


def lognormal(median: float, sigma: float) -> Quantile:
    """exp of a normal variable; `sigma` is its standard deviation."""
    mu = math.log(median)
    return lambda u: math.exp(mu + sigma * _STANDARD.inv_cdf(u))


def lognormal_of_quartile(median: float, p75: float) -> Quantile:
    """The lognormal with this median and upper quartile."""
    return lognormal(median, math.log(p75 / median) / Z_UPPER_QUARTILE)


def pareto(minimum: float, alpha: float) -> Quantile:
    """Power law: P(X > x) = (minimum / x) ** alpha. Its mean is infinite for alpha <= 1: give it a limit."""
    exponent = -1.0 / alpha
    return lambda u: minimum * (1 - u) ** exponent


def empirical(values: Sequence[float]) -> Quantile:
    """One of the recorded values, all alike.

    Raises:
        ValueError: there is none.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("an empirical distribution needs at least one value")
    return lambda u: ordered[int(u * len(ordered))]


def with_quantiles(points: Mapping[float, float]) -> Quantile:
    """Through given quantiles: straight lines between them on lognormal paper, continued beyond the first and last.

    This is how a body and a heavier tail are had from what papers tell of lengths: median, upper quartile, and the
    longest of a thousand ({0.5: 585, 0.75: 930, 0.999: 16384}). Through two points it is the lognormal.

    Args:
        points: at least two; probabilities between 0 and 1; values positive and not falling.

    Raises:
        ValueError: the points are not such.
    """
    ordered = sorted(points.items())
    values = [value for _, value in ordered]
    if len(ordered) < 2 or not (ordered[0][0] > 0 and ordered[-1][0] < 1):
        raise ValueError("quantiles need at least two probabilities, between 0 and 1")
    if values[0] <= 0 or any(after < before for before, after in itertools.pairwise(values)):
        raise ValueError("quantiles must be positive and may not fall")
    scores = [_STANDARD.inv_cdf(p) for p, _ in ordered]
    logs = [math.log(value) for value in values]

    def quantile(u: float) -> float:
        score = _STANDARD.inv_cdf(u)
        index = min(max(bisect_right(scores, score), 1), len(scores) - 1)
        slope = (logs[index] - logs[index - 1]) / (scores[index] - scores[index - 1])
        return math.exp(logs[index - 1] + slope * (score - scores[index - 1]))

    return quantile


def clipped(quantile: Quantile, low: float = 0.0, high: float = math.inf) -> Quantile:
    """What lies outside becomes the limit itself: an answer is cut off, a latency has its time-out."""
    return lambda u: min(max(quantile(u), low), high)
