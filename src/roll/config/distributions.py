"""Probability distributions for simulations, each defined by its quantile function."""

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
    "compute_mean",
]

Quantile: TypeAlias = Callable[[float], float]
"""Maps a probability in (0, 1) to the value below which that fraction of draws lies."""

_STANDARD_NORMAL = NormalDist()


class FixedDistribution(Section):
    """A constant value."""

    type: Literal["fixed"] = option("fixed", "Distribution type.")
    value: float = option(..., "The value.", ge=0)

    def quantile_function(self) -> Quantile:
        """Return the quantile function, which equals `value` for every probability."""
        return lambda u: self.value


class UniformDistribution(Section):
    """The uniform distribution between two values."""

    type: Literal["uniform"] = option("uniform", "Distribution type.")
    low: float = option(..., "Smallest value.", ge=0)
    high: float = option(..., "Largest value.", ge=0)

    def quantile_function(self) -> Quantile:
        """Return the quantile function: a straight line from `low` to `high`."""
        return lambda u: self.low + u * (self.high - self.low)


class NormalDistribution(Section):
    """The normal distribution, without negative values."""

    type: Literal["normal"] = option("normal", "Distribution type.")
    mean: float = option(..., "Mean of the normal variable.")
    std: float = option(..., "Standard deviation of the normal variable.", ge=0)
    negative: Literal["redraw", "zero"] = option(
        "redraw", "`redraw`: values below 0 are drawn again, which raises the mean. `zero`: values below 0 become 0."
    )

    @model_validator(mode="after")
    def _check_positive_part(self) -> NormalDistribution:
        if self.std > 0 and 1 - self._compute_redrawn_fraction() < 1e-9:
            raise ValueError(f"normal(mean={self.mean:g}, std={self.std:g}) is never positive: raise its mean")
        return self

    def _compute_redrawn_fraction(self) -> float:
        """Return the fraction of values that are resampled because they are below 0; 0 with `negative: zero`."""
        return NormalDist(self.mean, self.std).cdf(0.0) if self.negative == "redraw" else 0.0

    def quantile_function(self) -> Quantile:
        """Return the quantile function of the normal variable, truncated or clamped at 0."""
        if self.std == 0:
            return lambda u: max(self.mean, 0.0)
        # `inv_cdf` raises at 0 and 1, which a probability within rounding of them would otherwise reach.
        law, below, tiny = NormalDist(self.mean, self.std), self._compute_redrawn_fraction(), 1e-15
        return lambda u: max(law.inv_cdf(min(max(below + u * (1 - below), tiny), 1 - tiny)), 0.0)


class LognormalDistribution(Section):
    """The lognormal distribution, defined by its median and either its upper quartile or its sigma."""

    type: Literal["lognormal"] = option("lognormal", "Distribution type.")
    median: float = option(..., "Median.", gt=0)
    p75: float | None = option(None, "Upper quartile.", gt=0)
    sigma: float | None = option(None, "Standard deviation of the logarithm.", ge=0)
    max: float | None = option(None, "Upper bound, to which larger values are clamped.", gt=0)

    @model_validator(mode="after")
    def _check_parameters(self) -> LognormalDistribution:
        if (self.p75 is None) == (self.sigma is None):
            raise ValueError("exactly one of p75 and sigma must be set")
        if self.p75 is not None and self.p75 < self.median:
            raise ValueError(f"p75 must be >= median, got {self.p75:g} and {self.median:g}")
        return self

    def quantile_function(self) -> Quantile:
        """Return the quantile function: exp of the normal variable's quantile, at most `max`."""
        mu, sigma = math.log(self.median), self.sigma or 0.0
        if self.p75 is not None:
            sigma = math.log(self.p75 / self.median) / _STANDARD_NORMAL.inv_cdf(0.75)
        return _clamp_quantile(lambda u: math.exp(mu + sigma * _STANDARD_NORMAL.inv_cdf(u)), self.max)


class ParetoDistribution(Section):
    """A power law: P(X > x) = (minimum / x) ** alpha."""

    type: Literal["pareto"] = option("pareto", "Distribution type.")
    minimum: float = option(..., "Smallest value.", gt=0)
    alpha: float = option(..., "Exponent; the mean is infinite for 1 or less.", gt=0)
    max: float = option(..., "Upper bound, to which larger values are clamped.", gt=0)

    def quantile_function(self) -> Quantile:
        """Return the quantile function: the power law solved for x, at most `max`."""
        exponent = -1.0 / self.alpha
        return _clamp_quantile(lambda u: self.minimum * (1 - u) ** exponent, self.max)


class EmpiricalDistribution(Section):
    """Recorded values, each with the same probability."""

    type: Literal["empirical"] = option("empirical", "Distribution type.")
    values: list[float] = option([], "The values.")
    file: str | None = path_option(None, "A text file with one value on each line, instead of `values`.")

    @model_validator(mode="after")
    def _check_values(self) -> EmpiricalDistribution:
        if bool(self.values) == (self.file is not None):
            raise ValueError("exactly one of values and file must be set")
        if any(value < 0 for value in self.values):
            raise ValueError(f"values must be >= 0, got {min(self.values):g}")
        return self

    def quantile_function(self) -> Quantile:
        """Return the quantile function of the sorted values.

        Raises:
            ConfigError: the file cannot be read, has no values, or has a negative value.
        """
        ordered = sorted(self.values or self._read_values())
        return lambda u: ordered[int(u * len(ordered))]

    def _read_values(self) -> list[float]:
        try:
            values = [float(line) for line in Path(str(self.file)).read_text(encoding="utf-8").split()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"distribution file '{self.file}' cannot be read: {error}.") from None
        if not values or min(values) < 0:
            raise ConfigError(
                f"distribution file '{self.file}' must contain at least one value, and every value must be >= 0."
            )
        return values


class QuantilesDistribution(Section):
    """A distribution that interpolates quantiles; log(value) is linear in the normal quantile of the probability.

    The first and the last segment extend beyond the outer points. Papers often report such points: median, upper
    quartile, and the maximum of a thousand values ([[0.5, 585], [0.75, 930], [0.999, 16384]]). With two points, the
    distribution is lognormal.
    """

    type: Literal["quantiles"] = option("quantiles", "Distribution type.")
    points: list[list[float]] = option(
        ..., "Pairs of probability and value.", examples=[[[0.5, 585], [0.75, 930], [0.999, 16384]]]
    )
    max: float | None = option(None, "Upper bound, to which larger values are clamped.", gt=0)

    @model_validator(mode="after")
    def _check_points(self) -> QuantilesDistribution:
        if any(len(point) != 2 for point in self.points):
            raise ValueError("each point must be a pair of probability and value")
        if len(self.points) < 2 or self.points[0][0] <= 0 or self.points[-1][0] >= 1:
            raise ValueError("there must be at least two points, with probabilities between 0 and 1")
        for (p, value), (q, after) in itertools.pairwise(self.points):
            if not (p < q and value <= after):
                raise ValueError(
                    f"points must be in ascending order, but [{q:g}, {after:g}] comes after [{p:g}, {value:g}]"
                )
        if self.points[0][1] <= 0:
            raise ValueError(f"values must be positive, got {self.points[0][1]:g}")
        return self

    def quantile_function(self) -> Quantile:
        """Return the quantile function: the interpolation of the points, at most `max`."""
        scores = [_STANDARD_NORMAL.inv_cdf(p) for p, _ in self.points]
        logs = [math.log(value) for _, value in self.points]

        def interpolate(u: float) -> float:
            score = _STANDARD_NORMAL.inv_cdf(u)
            index = min(max(bisect_right(scores, score), 1), len(scores) - 1)
            slope = (logs[index] - logs[index - 1]) / (scores[index] - scores[index - 1])
            return math.exp(logs[index - 1] + slope * (score - scores[index - 1]))

        return _clamp_quantile(interpolate, self.max)


def _clamp_quantile(quantile: Quantile, maximum: float | None) -> Quantile:
    """Clamp a quantile function to `maximum`, such as a length limit or a timeout."""
    return quantile if maximum is None else lambda u: min(quantile(u), maximum)


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
"""The distribution of a random quantity."""


def compute_mean(distribution: DistributionConfig, maximum: float = math.inf, num_points: int = 1000) -> float:
    """Compute the mean of min(X, maximum) by the midpoint rule over the quantile function."""
    # Every type of distribution has a quantile function, but not every one a closed form of this mean; and the midpoint
    # rule avoids the ends 0 and 1, at which a quantile may be infinite.
    quantile = distribution.quantile_function()
    return math.fsum(min(quantile((i + 0.5) / num_points), maximum) for i in range(num_points)) / num_points
