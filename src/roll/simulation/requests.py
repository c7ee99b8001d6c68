"""Requests in the batch of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["RequestState", "SimulatedRequest"]


class RequestState(Enum):
    """State of a request in the batch."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    REMOVED = 3


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in the batch of a simulated engine."""

    request_id: str
    num_prompt: int
    """Number of prompt tokens."""
    num_output: int
    """Number of tokens that the request will generate."""
    priority: int = 0
    order: int = 0
    """Order of arrival, set by the batch."""
    state: RequestState = RequestState.WAITING
    num_generated: int = 0
    """Number of tokens generated in the first `num_counted_steps` steps of the batch."""
    num_counted_steps: int = 0
    num_to_prefill: int = 0
    """Number of tokens that are not prefilled yet."""
    num_cached: int = 0
    """Leading tokens in the prefix cache, which are not prefilled again."""
