"""Descriptions of all metrics, loaded from `metrics.yaml`: unit, meaning, and interpretation of bad values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

__all__ = ["MetricDescription", "MetricSection", "find_meaning", "list_metric_sections"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDescription:
    """Description of a metric, or of a family of metrics."""

    name: str
    """Name in metrics.jsonl; `{…}` stands for any text."""
    unit: str
    means: str
    bad: str
    """Interpretation of a bad value, and advice; empty if no value is bad."""
    also_held_out: bool = False
    """True if `eval/` plus the last part of the name is the same metric on held-out examples."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the metric is recorded in training and, if it is also measured on held-out data, in
        evaluations.
        """
        return (self.name, f"eval/{self.name.rpartition('/')[2]}") if self.also_held_out else (self.name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSection:
    """A section of metrics in the documentation."""

    title: str
    about: str
    metrics: Sequence[MetricDescription]


@cache
def list_metric_sections() -> tuple[MetricSection, ...]:
    """Return all sections of metrics, in the order in which they are documented."""
    text = (files("roll.tracking") / "metrics.yaml").read_text(encoding="utf-8")
    return tuple(
        MetricSection(
            title=section["section"],
            about=section["about"],
            metrics=tuple(MetricDescription(name=name, **facts) for name, facts in section["metrics"].items()),
        )
        for section in yaml.safe_load(text)
    )


def find_meaning(name: str) -> MetricDescription | None:
    """Return the description of a metric, from the most specific family that matches; `None` if there is none."""
    found = [
        (len(re.sub(r"\{.*?\}", "", own)), meaning)
        for section in list_metric_sections()
        for meaning in section.metrics
        for own in meaning.names
        if re.fullmatch(re.sub(r"\\\{.*?\\\}", ".+", re.escape(own)), name)
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None
