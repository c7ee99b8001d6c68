"""How many groups of each domain are trained: exact shares over time, whatever a domain's speed.

A synchronous step trains what it was dealt, domain by domain. With an async ratio above 0, an update takes the oldest
finished groups, so the quota holds for what is launched: every place that is launched is dealt, a refill keeps its
domain, and a place whose group expires goes back to its domain. Since `wait` drops nothing, the domains' totals of
what was trained then differ from their shares by no more than the groups that are still live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["Quotas"]


class Quotas:
    """Deals places out to domains.

    After every place, each domain's total differs by less than one place per domain from its share of all places.

    Args:
        weights: of the domains, in any unit; none means that the mix is free.
        places: that the whole run will deal, where that is known.
    """

    def __init__(self, weights: Mapping[str, float], places: int = 0) -> None:
        total = sum(weights.values())
        self._shares = {domain: weight / total for domain, weight in weights.items()}
        self._dealt: Counter[str] = Counter()
        self._planned: Counter[str] = self.deal(places)
        self._dealt.clear()

    def __bool__(self) -> bool:
        return bool(self._shares)

    def deal(self, places: int) -> Counter[str]:
        """The next places by domain; empty where the mix is free."""
        return Counter(self.order(places))

    def order(self, places: int) -> list[str]:
        """The next places' domains, one after the other; empty where the mix is free."""
        found = []
        for _ in range(places if self._shares else 0):
            due = self._dealt.total() + 1
            domain = max(self._shares, key=lambda name: round(self._shares[name] * due - self._dealt[name], 9))
            self._dealt[domain] += 1
            found.append(domain)
        return found

    def due(self, domain: str) -> int:
        """Places of a domain that the run has still to deal; nothing was charged or given back."""
        return self._planned[domain] - self._dealt[domain]

    def charge(self, domains: Iterable[str]) -> None:
        """These take places that were not dealt: draws that an earlier process left in flight."""
        self._dealt.update(domain for domain in domains if domain in self._shares)

    def give_back(self, domains: Iterable[str]) -> None:
        """These had places, but nothing will be trained in them."""
        self._dealt.subtract(domain for domain in domains if domain in self._shares)
