"""Random quantities of a simulation, each defined by its quantile function."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from roll.config.base import Section, option, path_option
from roll.errors import ConfigError

__all__ = [
    "DistributionConfig",
    "EmpiricalDistribution",
    "FixedDistribution",
    "LognormalDistribution",
    "NormalDistribution",
    "ParetoDistribution",
    "Quantile",
    "QuantilesDistribution",
    "UniformDistribution",
    "mean_of",
]

Quantile: TypeAlias = Callable[[float], float]
"""Maps a probability in (0, 1) to the value below which that share of draws lies."""

_STANDARD = NormalDist()


class FixedDistribution(Section):
    """A constant."""

    type: Literal["fixed"] = option("fixed", "The kind.")
    value: float = option(..., "The value.", ge=0)

    def quantile(self) -> Quantile:
        """Return the quantile function: the value, for every probability."""
        return lambda u: self.value


class UniformDistribution(Section):
    """Any value between two, with equal probability."""

    type: Literal["uniform"] = option("uniform", "The kind.")
    low: float = option(..., "Lowest.", ge=0)
    high: float = option(..., "Highest.", ge=0)

    def quantile(self) -> Quantile:
        """Return the quantile function: a straight line from `low` to `high`."""
        return lambda u: self.low + u * (self.high - self.low)


class NormalDistribution(Section):
    """Normal, without negative values."""

    type: Literal["normal"] = option("normal", "The kind.")
    mean: float = option(..., "Mean of the normal variable.")
    std: float = option(..., "Standard deviation of the normal variable.", ge=0)
    negative: Literal["redraw", "zero"] = option(
        "redraw", "Values below 0 are drawn again, which makes the mean larger, or become 0."
    )

    @model_validator(mode="after")
    def _has_a_positive_part(self) -> NormalDistribution:
        if self.std > 0 and 1 - self._left_out() < 1e-9:
            raise ValueError(f"normal(mean={self.mean:g}, std={self.std:g}) is never positive: change its mean")
        return self

    def _left_out(self) -> float:
        """Return the share of draws that are drawn again."""
        return NormalDist(self.mean, self.std).cdf(0.0) if self.negative == "redraw" else 0.0

    def quantile(self) -> Quantile:
        """Return the quantile function of the normal variable, limited to values above 0 or clamped at 0."""
        if self.std == 0:
            return lambda u: max(self.mean, 0.0)
        law, below, tiny = NormalDist(self.mean, self.std), self._left_out(), 1e-15
        return lambda u: max(law.inv_cdf(min(max(below + u * (1 - below), tiny), 1 - tiny)), 0.0)


class LognormalDistribution(Section):
    """exp of a normal variable, given by its median and either its upper quartile or its sigma."""

    type: Literal["lognormal"] = option("lognormal", "The kind.")
    median: float = option(..., "Median.", gt=0)
    p75: float | None = option(None, "Upper quartile.", gt=0)
    sigma: float | None = option(None, "Standard deviation of the logarithm.", ge=0)
    max: float | None = option(None, "What is larger becomes this.", gt=0)

    @model_validator(mode="after")
    def _one_of(self) -> LognormalDistribution:
        if (self.p75 is None) == (self.sigma is None):
            raise ValueError("give either p75 or sigma")
        if self.p75 is not None and self.p75 < self.median:
            raise ValueError(f"p75 {self.p75:g} is below the median {self.median:g}")
        return self

    def quantile(self) -> Quantile:
        """Return the quantile function: exp of the normal variable's, cut off at `max`."""
        mu, sigma = math.log(self.median), self.sigma or 0.0
        if self.p75 is not None:
            sigma = math.log(self.p75 / self.median) / _STANDARD.inv_cdf(0.75)
        return _cut_off(lambda u: math.exp(mu + sigma * _STANDARD.inv_cdf(u)), self.max)


class ParetoDistribution(Section):
    """A power law: P(X > x) = (minimum / x) ** alpha."""

    type: Literal["pareto"] = option("pareto", "The kind.")
    minimum: float = option(..., "Smallest value.", gt=0)
    alpha: float = option(..., "Exponent; the mean is infinite for 1 or less.", gt=0)
    max: float = option(..., "What is larger becomes this.", gt=0)

    def quantile(self) -> Quantile:
        """Return the quantile function: the power law solved for x, cut off at `max`."""
        exponent = -1.0 / self.alpha
        return _cut_off(lambda u: self.minimum * (1 - u) ** exponent, self.max)


class EmpiricalDistribution(Section):
    """Recorded values, each with the same probability."""

    type: Literal["empirical"] = option("empirical", "The kind.")
    values: list[float] = option([], "The values.")
    file: str | None = path_option(None, "A text file with one value on each line, instead of `values`.")

    @model_validator(mode="after")
    def _one_of(self) -> EmpiricalDistribution:
        if bool(self.values) == (self.file is not None):
            raise ValueError("give either values or a file")
        if any(value < 0 for value in self.values):
            raise ValueError(f"values are not negative, got {min(self.values):g}")
        return self

    def quantile(self) -> Quantile:
        """Return the quantile function of the sorted values.

        Raises:
            ConfigError: the file cannot be read, holds no values, or holds negative ones.
        """
        ordered = sorted(self.values or self._read())
        return lambda u: ordered[int(u * len(ordered))]

    def _read(self) -> list[float]:
        try:
            values = [float(line) for line in Path(str(self.file)).read_text(encoding="utf-8").split()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"distribution file '{self.file}' cannot be read: {error}.") from None
        if not values or min(values) < 0:
            raise ConfigError(f"distribution file '{self.file}' needs at least one value, and none below 0.")
        return values


class QuantilesDistribution(Section):
    """Interpolated between given quantiles: straight lines on lognormal paper, extrapolated beyond the first and last.

    This models the body and the heavier tail of lengths as papers report them: median, upper quartile, and the longest
    of a thousand ([[0.5, 585], [0.75, 930], [0.999, 16384]]). With two points it is the lognormal distribution.
    """

    type: Literal["quantiles"] = option("quantiles", "The kind.")
    points: list[list[float]] = option(
        ..., "Pairs of probability and value.", examples=[[[0.5, 585], [0.75, 930], [0.999, 16384]]]
    )
    max: float | None = option(None, "What is larger becomes this.", gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> QuantilesDistribution:
        if any(len(point) != 2 for point in self.points):
            raise ValueError("each point is a pair of probability and value")
        if len(self.points) < 2 or self.points[0][0] <= 0 or self.points[-1][0] >= 1:
            raise ValueError("at least two points, with probabilities between 0 and 1, are needed")
        for (p, value), (q, after) in itertools.pairwise(self.points):
            if not (p < q and value <= after):
                raise ValueError(f"points ascend, but [{q:g}, {after:g}] comes after [{p:g}, {value:g}]")
        if self.points[0][1] <= 0:
            raise ValueError(f"values are positive, got {self.points[0][1]:g}")
        return self

    def quantile(self) -> Quantile:
        """Return the quantile function: the lines between the points, cut off at `max`."""
        scores = [_STANDARD.inv_cdf(p) for p, _ in self.points]
        logs = [math.log(value) for _, value in self.points]

        def on_the_lines(u: float) -> float:
            score = _STANDARD.inv_cdf(u)
            index = min(max(bisect_right(scores, score), 1), len(scores) - 1)
            slope = (logs[index] - logs[index - 1]) / (scores[index] - scores[index - 1])
            return math.exp(logs[index - 1] + slope * (score - scores[index - 1]))

        return _cut_off(on_the_lines, self.max)


def _cut_off(quantile: Quantile, highest: float | None) -> Quantile:
    """Clamp a quantile function to `highest`: an answer is cut off at its length limit, a latency at its timeout."""
    return quantile if highest is None else lambda u: min(quantile(u), highest)


DistributionConfig: TypeAlias = Annotated[
    FixedDistribution
    | UniformDistribution
    | NormalDistribution
    | LognormalDistribution
    | ParetoDistribution
    | EmpiricalDistribution
    | QuantilesDistribution,
    Field(discriminator="type"),
]
"""A random quantity."""


def mean_of(distribution: DistributionConfig, highest: float = math.inf, num_points: int = 1000) -> float:
    """Return the mean of min(X, highest), by the midpoint rule over the quantile function."""
    quantile = distribution.quantile()
    return math.fsum(min(quantile((i + 0.5) / num_points), highest) for i in range(num_points)) / num_points
