"""Promises: the results of requests that take long, which clients fetch with a long poll.

    submit ─► request ID                retrieve ─► result, error, or "try again" after `poll_s`

A result can be fetched several times, because a response may be lost on its way. It is dropped `KEEP_S` after it was
fetched first, or `KEEP_UNREAD_S` after it was complete.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from roll.serving.failures import ApiError, RequestFailure, describe_failure

__all__ = ["Promise", "Promises", "Result"]

KEEP_S = 600.0
KEEP_UNREAD_S = 6 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a request."""

    body: bytes
    content_type: str = "application/json"


@dataclass(kw_only=True, slots=True)
class Promise:
    """A result that is available later."""

    request_id: str
    owner: str
    sequence_ids: tuple[str, ...] = ()
    """For sampling: the ID of each sequence."""
    outcome: Result | RequestFailure | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    drop_at: float = float("inf")
    was_read: bool = False
    can_be_canceled: bool = False

    def resolve(self, outcome: Result | RequestFailure, now: float | None = None) -> None:
        """Set the outcome, unless there is one already."""
        if self.outcome is None:
            self.outcome = outcome
            self.drop_at = (time.monotonic() if now is None else now) + KEEP_UNREAD_S
            self.done.set()


class Promises:
    """The promises of a server.

    Args:
        clock: A function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._promises: dict[str, Promise] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clock = clock

    def __len__(self) -> int:
        return len(self._promises)

    def create(self, owner: str, *, num_sequences: int = 0) -> Promise:
        """Return a new promise."""
        request_id = uuid.uuid4().hex
        ids = tuple(f"{request_id}:{index}" for index in range(num_sequences))
        promise = self._promises[request_id] = Promise(request_id=request_id, owner=owner, sequence_ids=ids)
        return promise

    def run(self, promise: Promise, work: Awaitable[Result], *, can_be_canceled: bool = True) -> None:
        """Run a coroutine in the background; its result or error becomes the promise's outcome.

        Args:
            promise: A promise without an outcome.
            work: The coroutine.
            can_be_canceled: Whether `cancel` ends the coroutine.
        """

        async def run() -> None:
            try:
                promise.resolve(await work, self._clock())
            except asyncio.CancelledError:
                promise.resolve(RequestFailure("the request was canceled."), self._clock())
                raise
            except Exception as error:
                promise.resolve(describe_failure(error), self._clock())
            finally:
                self._tasks.pop(promise.request_id, None)

        self._tasks[promise.request_id] = asyncio.create_task(run(), name=f"request {promise.request_id}")
        promise.can_be_canceled = can_be_canceled

    def find(self, request_id: str, owner: str) -> Promise:
        """Return a promise.

        Raises:
            ApiError: There is no such promise, its result has been dropped, or it belongs to another owner.
        """
        promise = self._promises.get(request_id)
        if promise is None or promise.owner != owner:
            raise ApiError(404, "there is no request with this ID, or its result has expired.", field="request_id")
        return promise

    async def wait(self, promise: Promise, timeout_s: float) -> Result | RequestFailure | None:
        """Wait for a promise's outcome; return `None` if there is none after `timeout_s`."""
        try:
            await asyncio.wait_for(promise.done.wait(), timeout_s)
        except TimeoutError:
            return None
        if not promise.was_read:
            promise.was_read, promise.drop_at = True, self._clock() + KEEP_S
        return promise.outcome

    def cancel(self, promise: Promise) -> None:
        """Cancel the work of a promise, if `run` has started it and it can be canceled."""
        if promise.can_be_canceled and (task := self._tasks.get(promise.request_id)):
            task.cancel()

    def drop_expired(self) -> None:
        """Drop results that have expired."""
        now = self._clock()
        for name in [name for name, promise in self._promises.items() if promise.drop_at <= now]:
            # The orders of models keep the promise, but not the memory of its result.
            self._promises.pop(name).outcome = RequestFailure("the result has expired.")

    async def close(self) -> None:
        """Cancel all work and end all polls."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for promise in self._promises.values():
            promise.resolve(RequestFailure("the server was stopped.", "server"))
