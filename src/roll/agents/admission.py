"""A limit on the concurrent requests of a session: each may take 100 MB of memory while it is read and answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from roll.agents.request_errors import RequestError

__all__ = ["RequestLimit"]


class RequestLimit:
    """Limits the concurrent requests of a session.

    Args:
        limit: Maximum number of concurrent requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_open = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as open within the `with` block.

        Raises:
            RequestError: Too many requests are open.
        """
        self.check(self._num_open, 1)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def check(self, num_running: int, num_new: int) -> None:
        """Check that `num_new` requests can start without exceeding the limit.

        Args:
            num_running: Number of requests that are running.
            num_new: Number of requests to start.

        Raises:
            RequestError: The limit would be exceeded.
        """
        if num_running + num_new > self._limit:
            message = f"{num_running} requests of this session are running, and the limit is {self._limit}."
            raise RequestError(429, "rate_limit_exceeded", message, retry_after_s=1)
