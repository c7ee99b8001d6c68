"""Device classes of engines, and the order in which the requests of a domain fill them.

    domain ─► preferred class ─(full)─► the cheapest other class ─(full)─► … ─► engines without a class

A class is full if none of its engines has room. With the preference `measured`, the classes are filled in order of
their measured price per token, for the answers of this domain, of an engine that is full.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from roll.rollout.pace import AnswerLatency, PaceCurve, PaceMeter

__all__ = ["MEASURED", "ClassOrder", "ClassSelector", "DeviceClasses", "rank_classes"]

MEASURED = "measured"
MIN_ANSWERS = 4.0
"""Minimum weight of a domain's answers from a class for which the class counts as measured."""
EXPLORATION_INTERVAL = 16
"""One of this many requests of a domain goes first to the classes that are not measured."""
TOLERANCE = 1.1
"""Ratio of times per token up to which two classes are considered equally fast."""

ClassOrder: TypeAlias = Sequence[Collection[str]]
"""Groups of classes; a request uses a group only if all engines of the earlier groups are full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClasses:
    """The classes of a run's engines, and the preferences of its domains."""

    engine_classes: Mapping[str, str] = field(default_factory=dict)
    """Class of each engine by its id; engines without an entry have no class."""
    engine_prices: Mapping[str, float] = field(default_factory=dict)
    """Price per hour of an engine of each class; if prices are not known, its number of devices."""
    preferences: Mapping[str, str] = field(default_factory=dict)
    """Preferred class by domain, or `measured`; other domains use all engines equally."""


def rank_classes(
    preference: str,
    token_prices: Mapping[str, float],
    *,
    unmeasured: Collection[str] = (),
    explores: bool = False,
) -> ClassOrder:
    """Return the order in which a request fills the classes.

    Args:
        preference: The preferred class, or `measured`.
        token_prices: Price per token of each class, for the answers of the request's domain.
        unmeasured: Classes that have not generated enough answers of the domain.
        explores: With the preference `measured`, whether the request goes to unmeasured classes first.
    """
    ordered = sorted(token_prices, key=lambda name: (name != preference, token_prices[name], name))
    if preference != MEASURED or not unmeasured:
        return [[name] for name in ordered]
    if len(unmeasured) == len(token_prices):
        return [ordered]
    first = list(unmeasured) if explores else []
    return [*([first] if first else []), *([name] for name in ordered if name not in first)]


class ClassSelector:
    """Chooses the order of classes for requests, and measures their times per token by domain."""

    def __init__(self, classes: DeviceClasses) -> None:
        self._classes = classes
        self._names = list(dict.fromkeys(classes.engine_classes.values()))
        self._meter = PaceMeter(TOLERANCE)
        self._curves: Mapping[str, PaceCurve] = {}
        """Pace curves by key; empty if they must be estimated again."""
        self._capacities = dict.fromkeys(self._names, 1)
        self._num_requests: dict[str, int] = {}
        for domain in classes.preferences:
            for name in self._names:
                self._meter.add(_build_key(domain, name))

    def get_class(self, engine_id: str) -> str:
        """Return the class of an engine; an empty string if it has none."""
        return self._classes.engine_classes.get(engine_id, "")

    def set_capacity(self, device_class: str, capacity: int) -> None:
        """Set the number of requests that an engine of a class can run at once."""
        self._capacities[device_class] = capacity

    def choose_order(self, domain: str) -> ClassOrder | None:
        """Return the order of classes for the next request of a domain; `None` if the domain has no preference."""
        preference = self._classes.preferences.get(domain)
        if preference is None:
            return None
        unmeasured = [name for name in self._names if self._meter.count_answers(_build_key(domain, name)) < MIN_ANSWERS]
        order = rank_classes(
            preference,
            self._compute_token_prices(domain),
            unmeasured=unmeasured,
            explores=self._num_requests.get(domain, 0) % EXPLORATION_INTERVAL == EXPLORATION_INTERVAL - 1,
        )
        return [*order, [""]]

    def count_request(self, domain: str) -> None:
        """Count a request of a domain that was sent to an engine."""
        self._num_requests[domain] = self._num_requests.get(domain, 0) + 1

    def record(self, device_class: str, answer: AnswerLatency) -> None:
        """Record an answer of an engine of a class."""
        if device_class and answer.domain in self._classes.preferences:
            self._meter.record(_build_key(answer.domain, device_class), answer, self._capacities[device_class])
            self._curves = {}

    def _compute_token_prices(self, domain: str) -> dict[str, float]:
        """Return the price per token of each class, for answers of a domain on a full engine."""
        if not self._curves:
            self._curves = self._meter.estimate_curves()
        return {
            name: self._classes.engine_prices.get(name, 1.0)
            * self._curves[_build_key(domain, name)].compute_token_s(1.0)
            / self._capacities[name]
            for name in self._names
        }


def _build_key(domain: str, device_class: str) -> str:
    return f"{device_class}/{domain}"
