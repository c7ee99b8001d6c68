"""A request inside the batch of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Place", "SimulatedRequest"]


class Place(Enum):
    """Where a request is."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    GONE = 3


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request inside a batch."""

    request_id: str
    num_prompt: int
    """Tokens of its prompt."""
    num_wanted: int
    """Tokens that it will generate."""
    priority: int = 0
    order: int = 0
    """Of arrival, set by the batch."""
    place: Place = Place.WAITING
    generated: int = 0
    """Tokens it had when `since` steps were done."""
    since: int = 0
    to_prefill: int = 0
    """Of a prefilling one."""
    num_cached: int = 0
    """Tokens at its beginning that the cache holds for others, so that they are not prefilled again."""
