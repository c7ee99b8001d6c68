"""How many groups of each domain a step trains: exact shares over time, whatever a domain's speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

__all__ = ["Quotas"]


class Quotas:
    """Deals a step's places out to domains.

    After every step, each domain's total differs by less than one place per domain from its share of all places.

    Args:
        weights: of the domains, in any unit; none means that the mix is free.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._shares = {domain: weight / total for domain, weight in weights.items()}
        self._dealt: Counter[str] = Counter()

    def deal(self, places: int) -> Counter[str]:
        """The next step's places by domain; empty where the mix is free."""
        quota: Counter[str] = Counter()
        for _ in range(places if self._shares else 0):
            due = self._dealt.total() + 1
            domain = max(self._shares, key=lambda name: round(self._shares[name] * due - self._dealt[name], 9))
            self._dealt[domain] += 1
            quota[domain] += 1
        return quota
