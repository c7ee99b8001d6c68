"""A limit on the concurrent requests of a session: each may take 100 MB of memory while it is read and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from roll.agents.request_errors import RequestError, build_session_over_error

__all__ = ["RequestLimit"]


class RequestLimit:
    """Limits the concurrent requests of a session.

    Args:
        limit: Maximum number of concurrent requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_open = 0
        self._reads: set[asyncio.Task[bytes]] = set()
        self._closed = False

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

    async def read(self, body: Coroutine[None, None, bytes]) -> bytes:
        """Return the body of a request, unless the session ends before the body has arrived.

        Otherwise the images of an agent that sends slowly would stay in memory after its rollout has ended.

        Raises:
            RequestError: The session has ended.
        """
        task = asyncio.ensure_future(body)
        self._reads.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise build_session_over_error() from None
            raise  # the agent has disconnected
        finally:
            task.cancel()
            self._reads.discard(task)

    def close(self) -> None:
        """Stop reading the bodies of requests, because the session has ended."""
        self._closed = True
        for task in list(self._reads):
            task.cancel()

    def check(self, num_running: int, num_new: int) -> None:
        """Check that `num_new` requests can start without exceeding the limit.

        Args:
            num_running: Number of requests that are running.
            num_new: Number of requests to start.

        Raises:
            RequestError: The limit would be exceeded.
        """
        if num_running + num_new > self._limit:
            message = f"this session already has {num_running} running requests; the limit is {self._limit}."
            raise RequestError(429, "rate_limit_exceeded", message, retry_after_s=1)
