"""Promises: the results of requests that take long, which clients fetch with a long poll.

    submit ─► request ID                retrieve ─► result, error, or "try again" after `poll_s`

A result can be fetched several times, because a response may be lost. It is dropped `KEEP_S` after the first fetch, or
`KEEP_UNREAD_S` after the request completed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from roll.serving.failures import ApiError, RequestFailure, describe_failure
from roll.serving.journal import Journal
from roll.serving.submissions import Result, Submission

__all__ = ["Promise", "Promises"]

logger = logging.getLogger(__name__)

KEEP_S = 600.0
KEEP_UNREAD_S = 6 * 3600.0


@dataclass(kw_only=True, slots=True)
class Promise:
    """A result that is available later."""

    request_id: str
    owner: str
    num_sequences: int = 0
    """For sampling: the number of sequences."""
    outcome: Result | RequestFailure | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    drop_at: float = float("inf")
    was_read: bool = False
    can_be_canceled: bool = False
    journal: Journal | None = None

    @property
    def sequence_ids(self) -> list[str]:
        """For sampling: the ID of each sequence."""
        return [f"{self.request_id}:{index}" for index in range(self.num_sequences)]

    def resolve(self, outcome: Result | RequestFailure, now: float | None = None) -> None:
        """Set the outcome, unless there is one already, and add it to the journal first."""
        if self.outcome is None:
            if self.journal is not None:
                try:
                    self.journal.add_outcome(self.request_id, outcome)
                except OSError:
                    logger.exception("an outcome could not be recorded; a server that continues computes it again")
            self.outcome = outcome
            self.drop_at = (time.monotonic() if now is None else now) + KEEP_UNREAD_S
            self.done.set()


class Promises:
    """The promises of a server.

    Args:
        clock: A function that returns the time in seconds.
        journal: The journal of the server.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, journal: Journal | None = None) -> None:
        self._journal = journal
        self._promises: dict[str, Promise] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._promises)

    def __iter__(self) -> Iterator[str]:
        return iter(self._promises)

    def create(self, owner: str, submission: Submission, *, num_sequences: int = 0) -> Promise:
        """Return a promise for a request that is accepted now.

        If an earlier server completed the request, the promise already has the outcome.
        """
        if self._journal is not None:
            self._journal.add_request(owner, submission)
        name = submission.request_id
        promise = Promise(request_id=name, owner=owner, num_sequences=num_sequences)
        if submission.outcome is not None:
            promise.resolve(submission.outcome, self._clock())
        promise.journal = self._journal
        self._promises[name] = promise
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
                if not self._is_closed:
                    promise.resolve(RequestFailure("the request was canceled."), self._clock())
                raise
            except Exception as error:
                promise.resolve(describe_failure(error), self._clock())
            finally:
                self._tasks.pop(promise.request_id, None)

        self._tasks[promise.request_id] = asyncio.create_task(run(), name=f"request {promise.request_id}")
        promise.can_be_canceled = can_be_canceled

    async def join(self, promise: Promise) -> None:
        """Wait until the work that `run` has started for a promise has ended."""
        if task := self._tasks.get(promise.request_id):
            await asyncio.gather(task, return_exceptions=True)

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
        """Wait for a promise's outcome.

        Returns:
            The outcome; `None` if there is none after `timeout_s`, or if the server stops.
        """
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
        """Cancel all work and end all polls. A later server continues the requests without an outcome."""
        self._is_closed = True
        for promise in self._promises.values():
            promise.done.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
