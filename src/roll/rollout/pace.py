"""Measured pace of engines: how long an engine takes for a token of an answer, depending on how busy it is.

    answers: tokens, seconds, requests at the engine ─► sums per engine, which decay ─► pace curves ─► load (`routing`)

An answer is generated while other requests run at the same engine, so its time per token also depends on their number.
A pace curve is the line through the times per token at different numbers of requests. Engines that are about equally
fast share one curve, because the answers of equal engines also differ. If all engines are about equally fast, nothing
is measured: every engine has the curve `UNMEASURED`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "UNMEASURED",
    "ActivityClock",
    "AnswerLatency",
    "AnswerSums",
    "PaceCurve",
    "PaceMeter",
    "estimate_pace_curves",
    "fit_pace_curve",
]

HALF_LIFE = 64
"""Number of answers per engine after which an answer counts half."""
PRIOR_ANSWERS = 4.0
"""Number of average answers of the other engines that are added to the answers of an engine."""
TOLERANCE = 1.25
"""Ratio of times per token up to which engines are considered equally fast."""
PRIOR_VARIANCE = 0.01
"""Weight of the prior slope of a curve: the slope is measured if the variance of the slots in use is larger."""
MIN_SLOPE = 0.02
"""Minimum slope of a curve and minimum time of an idle engine, as a share of the mean time per token."""
MIN_SECONDS = 1e-6
"""Minimum time of an answer that is measured."""
MAX_WEIGHT = 1e9
"""Weight of the latest answer up to which weights grow; then all sums are scaled down."""


@dataclass(frozen=True, slots=True)
class PaceCurve:
    """Predicted time per token of an answer: `idle_s + slope_s * use`, where `use` is the share of slots in use."""

    idle_s: float
    slope_s: float

    def compute_token_s(self, use: float) -> float:
        """Return the predicted time per token if this share of the engine's slots is in use."""
        return self.idle_s + self.slope_s * use


UNMEASURED = PaceCurve(1.0, 1.0)
"""Curve of all engines if they are equally fast or if nothing was measured: the load grows with the share of slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLatency:
    """The time that an engine took for an answer."""

    num_tokens: int
    seconds: float
    """Time at the engine, without pauses of the engine."""
    mean_requests: float
    """Mean number of requests at the engine during this time, including this one."""
    domain: str = ""
    """Domain of the answer's prompt."""


class ActivityClock:
    """Counts the time during which an engine is not paused, and the time of its requests."""

    def __init__(self) -> None:
        self.active_s = 0.0
        self.request_s = 0.0
        """Sum over all requests of the active time that they have spent at the engine."""
        self._last: float | None = None

    def advance(self, num_requests: int, *, paused: bool) -> tuple[float, float]:
        """Count the time since the last call, and return `active_s` and `request_s`.

        Args:
            num_requests: Number of requests since the last call.
            paused: Whether the engine has been paused since the last call.
        """
        now = asyncio.get_running_loop().time()
        if not paused and self._last is not None:
            self.active_s += now - self._last
            self.request_s += num_requests * (now - self._last)
        self._last = now
        return self.active_s, self.request_s


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Weighted sums over the answers of an engine."""

    answers: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    token_use: float = 0.0
    """Sum of tokens x share of slots in use."""
    token_use_squared: float = 0.0
    second_use: float = 0.0
    """Sum of seconds x share of slots in use."""

    def __add__(self, other: AnswerSums) -> AnswerSums:
        return AnswerSums(*(a + b for a, b in zip(self._list_values(), other._list_values(), strict=True)))

    def scale(self, factor: float) -> AnswerSums:
        """Return all sums multiplied by `factor`."""
        return AnswerSums(*(factor * value for value in self._list_values()))

    def _list_values(self) -> tuple[float, ...]:  # `dataclasses.astuple` is slower, because it copies every value
        return self.answers, self.tokens, self.seconds, self.token_use, self.token_use_squared, self.second_use


def fit_pace_curve(sums: AnswerSums, prior: PaceCurve | None = None) -> PaceCurve:
    """Fit a curve to answers by least squares, weighted by tokens; the slope and the idle time are positive.

    Args:
        sums: Sums with a positive number of tokens and seconds.
        prior: Curve whose relative slope is used as far as the answers do not determine the slope; by default a slope
            that doubles the time per token from an idle to a full engine.
    """
    token_s, use = sums.seconds / sums.tokens, sums.token_use / sums.tokens
    prior = prior or UNMEASURED
    prior_slope = token_s * prior.slope_s / prior.compute_token_s(use)
    variance = max(0.0, sums.token_use_squared / sums.tokens - use * use)
    covariance = sums.second_use / sums.tokens - token_s * use
    slope = (covariance + PRIOR_VARIANCE * prior_slope) / (variance + PRIOR_VARIANCE)
    # Both limits are positive, and the idle time that belongs to the larger one is positive.
    low, high = MIN_SLOPE * token_s / (1 + MIN_SLOPE * use), token_s / (MIN_SLOPE + use)
    slope = min(max(slope, low), high)
    return PaceCurve(token_s - slope * use, slope)


def estimate_pace_curves(
    sums: Mapping[str, AnswerSums], *, tolerance: float = TOLERANCE, prior_answers: float = PRIOR_ANSWERS
) -> dict[str, PaceCurve]:
    """Return the pace curve of every engine.

    Engines are compared at the mean use of all engines, and grouped in order of their times per token: a group ends
    before the first engine that takes more than `tolerance` times as long as the group's fastest engine. An engine
    without answers is as fast as the other engines on average.

    Args:
        sums: The answers of each engine.
        tolerance: Ratio up to which engines are considered equally fast.
        prior_answers: Number of average answers of the other engines that are added to those of an engine.
    """
    total = sum(sums.values(), AnswerSums())
    if total.tokens <= 0 or total.seconds <= 0:
        return dict.fromkeys(sums, UNMEASURED)
    fleet = fit_pace_curve(total)
    times = _estimate_token_times(sums, total, fleet, prior_answers)
    ordered = sorted(times, key=lambda name: (times[name], name))
    groups: list[list[str]] = []
    for name in ordered:
        if not groups or times[name] > tolerance * times[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    if len(groups) == 1:
        return dict.fromkeys(sums, UNMEASURED)
    use, curves = total.token_use / total.tokens, {}
    for group in groups:
        own = sum((sums[name] for name in group), AnswerSums())
        shape = fit_pace_curve(own, fleet) if own.tokens > 0 and own.seconds > 0 else fleet
        factor = sum(times[name] for name in group) / len(group) / shape.compute_token_s(use)
        curves |= dict.fromkeys(group, PaceCurve(factor * shape.idle_s, factor * shape.slope_s))
    return curves


def _estimate_token_times(
    sums: Mapping[str, AnswerSums], total: AnswerSums, fleet: PaceCurve, prior_answers: float
) -> dict[str, float]:
    """Return the time per token of each engine at the mean use of all engines; the fleet's curve corrects for
    differences in use.
    """
    use = total.token_use / total.tokens
    prior_tokens = prior_answers * total.tokens / total.answers

    def compute_expected_s(each: AnswerSums) -> float:
        """Return the time of the answers, as predicted by the curve of all engines."""
        return each.tokens * fleet.idle_s + each.token_use * fleet.slope_s

    ratios = {name: each.seconds / compute_expected_s(each) for name, each in sums.items() if each.tokens > 0}
    ratio_sum, typical_s = sum(ratios.values()), fleet.compute_token_s(use)
    times = {}
    for name, own in sums.items():
        num_others = len(ratios) - (name in ratios)
        prior = (ratio_sum - ratios.get(name, 0.0)) / num_others if num_others else 1.0
        expected_s = compute_expected_s(own) + prior_tokens * typical_s
        times[name] = (own.seconds + prior * prior_tokens * typical_s) / expected_s * typical_s
    return times


class PaceMeter:
    """Measures the pace of engines, or of groups of engines, from their answers; older answers count less.

    Args:
        tolerance: Ratio of times per token up to which engines are considered equally fast.
    """

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self._tolerance = tolerance
        self._sums: dict[str, AnswerSums] = {}
        self._weight = 1.0
        """Weight of the next answer; it grows, so that earlier answers need not be scaled down one by one."""

    def add(self, engine_id: str) -> None:
        """Begin to measure an engine, or measure it again from the start."""
        self._sums[engine_id] = AnswerSums()

    def remove(self, engine_id: str) -> None:
        """Forget an engine."""
        del self._sums[engine_id]

    def record(self, engine_id: str, answer: AnswerLatency, capacity: int) -> None:
        """Record an answer of an engine that has `capacity` slots."""
        if answer.num_tokens <= 0 or answer.seconds < MIN_SECONDS:
            return
        use = answer.mean_requests / capacity
        tokens, seconds = float(answer.num_tokens), answer.seconds
        sums = AnswerSums(1.0, tokens, seconds, tokens * use, tokens * use * use, seconds * use)
        self._sums[engine_id] += sums.scale(self._weight)
        self._weight *= 2.0 ** (1 / (HALF_LIFE * len(self._sums)))
        if self._weight > MAX_WEIGHT:
            self._sums = {name: each.scale(1 / self._weight) for name, each in self._sums.items()}
            self._weight = 1.0

    def estimate_curves(self) -> dict[str, PaceCurve]:
        """Return the pace curve of every engine."""
        sums = {name: each.scale(1 / self._weight) for name, each in self._sums.items()}
        return estimate_pace_curves(sums, tolerance=self._tolerance)

    def estimate_fleet_curve(self) -> PaceCurve | None:
        """Return the curve through the answers of all engines; `None` if there are no answers."""
        total = sum(self._sums.values(), AnswerSums())
        if total.tokens <= 0 or total.seconds <= 0:
            return None
        return fit_pace_curve(total.scale(1 / self._weight))

    def count_answers(self, engine_id: str) -> float:
        """Return the number of answers of an engine, each with its current weight; the latest answer counts 1."""
        return self._sums[engine_id].answers / self._weight
