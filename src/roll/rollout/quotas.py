"""How many groups of each domain are trained: exact shares over time, whatever a domain's speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy

__all__ = ["Quotas"]


class Quotas:
    """Deals places in training out to domains.

    However many places were dealt, each domain's total differs by less than one place per domain from its share.

    Args:
        weights: of the domains, in any unit; none means that the mix is free.
        num_dealt: places that were dealt before; what follows is what would have followed them.
    """

    def __init__(self, weights: Mapping[str, float], num_dealt: int = 0) -> None:
        total = sum(weights.values())
        self._shares = {domain: weight / total for domain, weight in weights.items()}
        self._dealt: Counter[str] = Counter()
        self.in_order(num_dealt)

    def __bool__(self) -> bool:
        """Whether the mix is fixed."""
        return bool(self._shares)

    def deal(self, places: int) -> Counter[str]:
        """The next places, counted by domain; empty where the mix is free."""
        return Counter(self.in_order(places))

    def in_order(self, places: int) -> list[str]:
        """The next places' domains; none where the mix is free."""
        domains = []
        for _ in range(places if self._shares else 0):
            due = self._dealt.total() + 1
            domain = max(self._shares, key=lambda name: round(self._shares[name] * due - self._dealt[name], 9))
            self._dealt[domain] += 1
            domains.append(domain)
        return domains

    def ahead(self, places: int) -> Counter[str]:
        """What `deal` would say, without dealing."""
        return deepcopy(self).deal(places)

    def give_back(self, domain: str) -> None:
        """A place was not used: the domain is owed it."""
        if self._shares:
            self._dealt[domain] -= 1
