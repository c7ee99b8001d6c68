"""Limits the rate of requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["RateLimiter"]

_MAX_BUCKETS = 10_000


class RateLimiter:
    """A token bucket for each name. A bucket fills with `per_s` tokens a second, up to `burst`.

    Args:
        per_s: tokens per second.
        burst: maximum number of tokens in a bucket.
        clock: function that returns the monotonic time in seconds.
    """

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def consume(self, name: str, cost: float = 1.0) -> float:
        """Take `cost` tokens from the bucket of `name`, even below 0; return the seconds until its level is 0 again."""
        now = self._clock()
        level, then = self._buckets.get(name, (self._burst, now))
        level = min(self._burst, level + (now - then) * self.per_s) - cost
        self._buckets[name] = level, now
        self._buckets.move_to_end(name)
        if len(self._buckets) > _MAX_BUCKETS:
            # Names may be addresses of peers, whose number is not bounded.
            self._buckets.popitem(last=False)
        return max(0.0, -level / self.per_s)

    def is_empty(self, name: str) -> bool:
        """Return whether a bucket has less than one token."""
        level, then = self._buckets.get(name, (self._burst, 0.0))
        return level + (self._clock() - then) * self.per_s < 1.0
