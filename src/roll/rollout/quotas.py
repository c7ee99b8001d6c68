"""Quotas that train the domains in exact proportions over time, even if the rollouts of some domains are slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy

from roll.types import PromptDraw

__all__ = ["Quotas"]


class Quotas:
    """Allocates training slots (groups of a batch) to domains in proportion to their weights.

    The number of slots of each domain always differs from its exact proportion by less than the number of domains.

    Args:
        weights: Weights of the domains, in any unit; empty if the mix is not fixed.
        num_allocated: Number of slots that were already allocated; the allocation continues from there.
    """

    def __init__(self, weights: Mapping[str, float], num_allocated: int = 0) -> None:
        total = sum(weights.values())
        self._shares = {domain: weight / total for domain, weight in weights.items()}
        self._allocated: Counter[str] = Counter()
        self.allocate_in_order(num_allocated)

    def __bool__(self) -> bool:
        """Return whether the domain mix is fixed."""
        return bool(self._shares)

    def get_key(self, draw: PromptDraw) -> str | None:
        """Return the domain whose quota a draw uses; `None` if the domain mix is not fixed."""
        return draw.prompt.domain if self._shares else None

    def allocate(self, num_slots: int) -> Counter[str]:
        """Allocate the next `num_slots` slots and return the number for each domain; empty if the mix is not fixed."""
        return Counter(self.allocate_in_order(num_slots))

    def allocate_in_order(self, num_slots: int) -> list[str]:
        """Allocate the next `num_slots` slots and return the domain of each, in order; empty if the mix is not
        fixed."""
        domains = []
        for _ in range(num_slots if self._shares else 0):
            due = self._allocated.total() + 1
            # Rounded, so that equal deficits compare as equal, and the first of these domains gets the slot.
            domain = max(self._shares, key=lambda name: round(self._shares[name] * due - self._allocated[name], 9))
            self._allocated[domain] += 1
            domains.append(domain)
        return domains

    def peek(self, num_slots: int) -> Counter[str]:
        """Return the result of the next `allocate` call, without allocating."""
        return deepcopy(self).allocate(num_slots)

    def return_slot(self, domain: str) -> None:
        """Return an unused slot of a domain, so that the domain gets another slot later."""
        if self._shares:
            self._allocated[domain] -= 1
