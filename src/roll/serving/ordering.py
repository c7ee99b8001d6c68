"""The requests of one model, in the order of their sequence IDs.

    6, 5, 5 (again), 7 ─► 5, 6, 7

Clients number the requests of a model 1, 2, 3, … They send several at once, the first chunk of a batch last, and repeat
a request whose response was lost. A request therefore waits for all earlier ones, and a repeated request gets the
promise of the first. A request with invalid data takes its place in the order and fails there, because the client does
not use its number again. Later requests do not wait for one that was rejected with an HTTP status.

A server that continues the work of an earlier one adds the requests of the journal before `start`. Those that the
earlier server has answered keep their outcomes, and run again only if they change the model.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from roll.serving.failures import ApiError, RequestFailure, describe_failure
from roll.serving.promises import Promise, Promises
from roll.serving.submissions import Result, Submission

__all__ = ["RequestOrder", "Work"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of one request."""

    run: Callable[[], Awaitable[Result]]
    changes_model: bool = False
    """True if the weights, the gradient or the optimizer's state depend on the request."""
    loses_gradient: bool = False
    """True if the gradient is discarded when the request fails."""
    after: Callable[[], Awaitable[None]] | None = None
    """Called after the request has succeeded, before the next request begins."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    promise: Promise
    work: Work


class RequestOrder:
    """Runs the requests of a model one after the other.

    Args:
        promises: The promises of the server.
        owner: The owner of the model.
        gap_timeout_s: The time after which a request that waits for an earlier one fails.
        on_gap: A function that is called with the error message of such a failure.
        first: The number of the first request.
    """

    def __init__(
        self, promises: Promises, owner: str, gap_timeout_s: float, on_gap: Callable[[str], None], first: int = 1
    ) -> None:
        self._promises = promises
        self._owner = owner
        self._gap_timeout_s = gap_timeout_s
        self._on_gap = on_gap
        self._next = first
        self._waiting: dict[int, _Waiting] = {}
        self._known: dict[int, tuple[bytes, Promise]] = {}
        self._rejected: dict[int, str] = {}
        """The request IDs of the numbers that were used only for requests that were rejected."""
        self._changed = asyncio.Event()
        self._closed = ""
        self._idle_work: Callable[[int], Awaitable[None]] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start running requests. Calling this again does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="requests of a model")

    def run_when_idle(self, work: Callable[[int], Awaitable[None]]) -> None:
        """Run a function when no request is waiting.

        Args:
            work: A function of the sequence ID of the last request. Errors are logged.
        """
        self._idle_work = work
        self._changed.set()

    def list_since(self, seq_id: int) -> Iterator[str]:
        """Return the IDs of the requests with a higher sequence ID."""
        known = {number: promise.request_id for number, (_, promise) in self._known.items()}
        return (request_id for number, request_id in (known | self._rejected).items() if number > seq_id)

    def reject(self, seq_id: int, submission: Submission) -> bool:
        """Note that a request was rejected, so that later requests do not wait for its number.

        The number can still be used, until a later request runs.

        Returns:
            Whether anything changes.
        """
        if seq_id in self._known or seq_id in self._rejected or seq_id < self._next or self._closed:
            return False
        self._rejected[seq_id] = submission.request_id
        self._changed.set()
        return True

    def submit(self, seq_id: int, submission: Submission, work: Work) -> Promise:
        """Add a request, or return the promise of the same request if it was added before.

        Raises:
            ApiError: The sequence ID was used for another request, or the model has been deleted.
        """
        if seq_id in self._known:
            earlier, promise = self._known[seq_id]
            if earlier != submission.digest:
                raise ApiError(400, f"{seq_id} was already used for another request of this model.", field="seq_id")
            return promise
        if self._closed:
            raise ApiError(404, self._closed, field="model_id")
        promise = self._promises.create(self._owner, submission)
        self._rejected.pop(seq_id, None)
        self._known[seq_id] = submission.digest, promise
        if seq_id < self._next:
            message = f"request {seq_id} arrived after request {self._next - 1} was processed."
            promise.resolve(RequestFailure(message, was_skipped=True))
        else:
            self._waiting[seq_id] = _Waiting(promise, work)
            self._changed.set()
        return promise

    async def close(self, reason: str) -> None:
        """End the running request, and fail all others."""
        self._closed = reason
        await self.stop()
        for each in self._waiting.values():
            each.promise.resolve(RequestFailure(reason))
        self._waiting.clear()

    async def stop(self) -> None:
        """End the running request, without an outcome."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._closed:
            if self._next in self._waiting:
                await self._process(self._waiting.pop(self._next))
                self._next += 1
                continue
            if self._waiting and self._can_skip_to(min(self._waiting)):
                self._next = min(self._waiting)
                continue
            if self._idle_work is not None:
                work, self._idle_work = self._idle_work, None
                await _run_logged(functools.partial(work, self._next - 1))
                continue
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._gap_timeout_s if self._waiting else None)
            except TimeoutError:
                self._skip_gap()
        for each in self._waiting.values():
            each.promise.resolve(RequestFailure(self._closed, "server"))

    def _can_skip_to(self, seq_id: int) -> bool:
        """Return whether no request can arrive anymore that would run before a waiting one."""
        if self._waiting[seq_id].promise.outcome is not None:  # the earlier server has waited for the missing ones
            return True
        missing = range(self._next, seq_id)
        return len(missing) <= len(self._rejected) and all(number in self._rejected for number in missing)

    async def _process(self, each: _Waiting) -> None:
        earlier = each.promise.outcome
        if isinstance(earlier, RequestFailure) and (
            # A failure of the server, such as too little memory, need not happen again, but the client knows of it.
            earlier.was_skipped or (each.work.loses_gradient and earlier.category == "server")
        ):
            self._on_gap(earlier.message)
            return
        if earlier is not None and not each.work.changes_model:
            return
        try:
            each.promise.resolve(await each.work.run())
        except asyncio.CancelledError:
            if self._closed:
                each.promise.resolve(RequestFailure(self._closed, "server"))
            raise
        except Exception as error:
            failure = describe_failure(error)
            each.promise.resolve(failure)
            if isinstance(earlier, Result):
                # The weights would differ from those that the client knows.
                logger.error("a model could not be restored: %s", failure.message)
                self._closed = f"the model could not be restored after the server was stopped: {failure.message}"
            return
        if each.work.after is not None:
            await _run_logged(each.work.after)

    def _skip_gap(self) -> None:
        """Fail the first waiting request, because an earlier one is missing, and continue after it."""
        first = min(self._waiting)
        missing = f"{self._next}" if first == self._next + 1 else f"{self._next} to {first - 1}"
        message = f"request {first} failed: request {missing} of this model did not arrive within "
        message += f"{self._gap_timeout_s:g} s."
        self._on_gap(message)
        self._waiting.pop(first).promise.resolve(RequestFailure(message, was_skipped=True))
        self._next = first + 1


async def _run_logged(work: Callable[[], Awaitable[None]]) -> None:
    """Run a function whose failure must not end the requests of a model."""
    try:
        await work()
    except Exception:
        logger.exception("the state of a model could not be stored or moved")
