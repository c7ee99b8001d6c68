"""Number of groups of each domain that are trained: exact shares over time, however slow a domain is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy

__all__ = ["Quotas"]


class Quotas:
    """Deals places in training to domains.

    After any number of places, each domain's total differs from its share by less than the number of domains.

    Args:
        weights: Weights of the domains, in any unit; empty if the mix is free.
        num_dealt: Number of places that were dealt before; dealing continues after them.
    """

    def __init__(self, weights: Mapping[str, float], num_dealt: int = 0) -> None:
        total = sum(weights.values())
        self._shares = {domain: weight / total for domain, weight in weights.items()}
        self._dealt: Counter[str] = Counter()
        self.deal_in_order(num_dealt)

    def __bool__(self) -> bool:
        """Return whether the domain mix is fixed."""
        return bool(self._shares)

    def deal(self, places: int) -> Counter[str]:
        """Deal the next places and return their number by domain; empty if the mix is free."""
        return Counter(self.deal_in_order(places))

    def deal_in_order(self, places: int) -> list[str]:
        """Deal the next places and return their domains in order; empty if the mix is free."""
        domains = []
        for _ in range(places if self._shares else 0):
            due = self._dealt.total() + 1
            domain = max(self._shares, key=lambda name: round(self._shares[name] * due - self._dealt[name], 9))
            self._dealt[domain] += 1
            domains.append(domain)
        return domains

    def peek(self, places: int) -> Counter[str]:
        """Return the result of the next `deal` without dealing."""
        return deepcopy(self).deal(places)

    def give_back(self, domain: str) -> None:
        """Return an unused place, so that the domain gets it again."""
        if self._shares:
            self._dealt[domain] -= 1
