"""Metric values that know how to reduce.

A part of a step (a rollout, a micro-batch, a rank) reports values of these types; `reduce` joins the parts,
and `flatten` turns the result into plain numbers by name. Joining is associative, so it may happen in stages.

Names are paths: `reward/mean`, `reward/<domain>/<component>`, `tokens/generated`, `time/generate_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Last", "Max", "Mean", "MetricValue", "Min", "Quantiles", "Sum", "flatten", "is_timing", "reduce"]

_TIMING_SUFFIXES = ("_s", "_per_s", "_rss_bytes")


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as sum and weight; has no value while the weight is 0."""

    total: float
    count: float = 1.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Mean of `values`, which may be none."""
        values = [float(v) for v in values]
        return cls(math.fsum(values), float(len(values)))

    def join(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def items(self) -> Iterator[tuple[str, float]]:
        if self.count:
            yield "", self.total / self.count


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds up."""

    value: float

    def join(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    def items(self) -> Iterator[tuple[str, float]]:
        yield "", self.value


@dataclass(frozen=True, slots=True)
class Max:
    """The largest; NaN if any part is NaN, so that trouble is not hidden."""

    value: float

    def join(self, other: Max) -> Max:
        return self if math.isnan(self.value) or self.value >= other.value else other

    def items(self) -> Iterator[tuple[str, float]]:
        yield "", self.value


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest; NaN if any part is NaN."""

    value: float

    def join(self, other: Min) -> Min:
        return self if math.isnan(self.value) or self.value <= other.value else other

    def items(self) -> Iterator[tuple[str, float]]:
        yield "", self.value


@dataclass(frozen=True, slots=True)
class Last:
    """The part reported last."""

    value: float

    def join(self, other: Last) -> Last:
        return other

    def items(self) -> Iterator[tuple[str, float]]:
        yield "", self.value


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Exact quantiles of all values (linear interpolation); becomes `<name>/p50` and so on. No values:
    nothing."""

    values: tuple[float, ...]
    at: tuple[float, ...] = (0.1, 0.5, 0.9)

    def join(self, other: Quantiles) -> Quantiles:
        return Quantiles(self.values + other.values, self.at)

    def items(self) -> Iterator[tuple[str, float]]:
        ordered = sorted(self.values)
        for share in self.at if ordered else ():
            position = share * (len(ordered) - 1)
            low = math.floor(position)
            high = min(low + 1, len(ordered) - 1)
            yield f"p{share * 100:g}", ordered[low] + (ordered[high] - ordered[low]) * (position - low)


MetricValue: TypeAlias = Mean | Sum | Max | Min | Last | Quantiles
_Nested: TypeAlias = Mapping[str, Any]


def reduce(parts: Iterable[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """Join the parts' values by name, in the order given.

    Raises:
        TypeError: two parts report one name with different types.
    """
    joined: dict[str, MetricValue] = {}
    for part in parts:
        for name, value in part.items():
            joined[name] = _join(name, joined[name], value) if name in joined else value
    return joined


def _join(name: str, first: MetricValue, second: Any) -> MetricValue:
    if type(first) is not type(second):
        raise TypeError(
            f"metric '{name}' is a {type(first).__name__} in one part, a {type(second).__name__} in another"
        )
    return first.join(second)


def flatten(metrics: _Nested, prefix: str = "") -> dict[str, float]:
    """Plain numbers by path, of metric values, numbers, and mappings of these.

    >>> flatten({"reward": {"mean": Mean(3.0, 4.0)}, "step_s": 2})
    {'reward/mean': 0.75, 'step_s': 2.0}
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(value, Mapping):
            flat |= flatten(value, path)
        elif isinstance(value, Mean | Sum | Max | Min | Last | Quantiles):
            flat |= {f"{path}/{part}" if part else path: number for part, number in value.items()}
        else:
            flat[path] = float(value)
    return flat


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine's speed or memory, so that two equal runs may differ in it."""
    return name.startswith(("time/", "memory/")) or name.endswith(_TIMING_SUFFIXES) or "/time/" in name
