"""The meaning and the unit of every metric, and what a bad value means, from `metrics.yaml`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

__all__ = ["MetricMeaning", "MetricSection", "meaning_of", "metric_sections"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricMeaning:
    """One metric, or a family of them."""

    name: str
    """Name in metrics.jsonl; `{…}` stands for any text."""
    unit: str
    means: str
    bad: str
    """What a bad value means, and what to do; empty if no value is bad."""
    also_held_out: bool = False
    """Whether the last part of the name below `eval/` is the same metric on held-out examples."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the metric."""
        return (self.name, f"eval/{self.name.rpartition('/')[2]}") if self.also_held_out else (self.name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSection:
    """Metrics that belong together."""

    title: str
    about: str
    metrics: Sequence[MetricMeaning]


@cache
def metric_sections() -> tuple[MetricSection, ...]:
    """Return all sections of metrics, in the order in which they are documented."""
    text = (files("roll.tracking") / "metrics.yaml").read_text(encoding="utf-8")
    return tuple(
        MetricSection(
            title=section["section"],
            about=section["about"],
            metrics=tuple(MetricMeaning(name=name, **facts) for name, facts in section["metrics"].items()),
        )
        for section in yaml.safe_load(text)
    )


def meaning_of(name: str) -> MetricMeaning | None:
    """Return the meaning of a metric; of several families that match, the one that matches most of its name."""
    found = [
        (len(re.sub(r"\{.*?\}", "", own)), meaning)
        for section in metric_sections()
        for meaning in section.metrics
        for own in meaning.names
        if re.fullmatch(re.sub(r"\\\{.*?\\\}", ".+", re.escape(own)), name)
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None
