"""The requests of one model, in the order of their sequence IDs.

    6, 5, 5 (again), 7 ─► 5, 6, 7

Clients number the requests of a model 1, 2, 3, … They send several at once, the first chunk of a batch last, and repeat
a request whose response was lost. A request therefore waits for all earlier ones, and a repeated request gets the
promise of the first. A request that is invalid takes its place in the order and fails there, because the client does
not use its number again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from roll.serving.failures import ApiError, RequestFailure, describe_failure
from roll.serving.promises import Promise, Promises, Result

__all__ = ["RequestOrder", "Work"]

Work = Callable[[], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    promise: Promise
    work: Work


class RequestOrder:
    """Runs the requests of a model one after the other.

    Args:
        promises: The promises of the server.
        owner: The owner of the model.
        gap_timeout_s: The time after which requests fail that wait for an earlier one.
        on_gap: A function that is called with the message when that happens.
    """

    def __init__(self, promises: Promises, owner: str, gap_timeout_s: float, on_gap: Callable[[str], None]) -> None:
        self._promises = promises
        self._owner = owner
        self._gap_timeout_s = gap_timeout_s
        self._on_gap = on_gap
        self._next = 1
        self._waiting: dict[int, _Waiting] = {}
        self._known: dict[int, tuple[bytes, Promise]] = {}
        self._changed = asyncio.Event()
        self._closed = ""
        self._task = asyncio.create_task(self._run(), name="requests of a model")

    def submit(self, seq_id: int, digest: bytes, work: Work) -> Promise:
        """Add a request, or return the promise of the same request if it was added before.

        Raises:
            ApiError: The sequence ID was used for another request, or the model has been deleted.
        """
        if seq_id in self._known:
            earlier, promise = self._known[seq_id]
            if earlier != digest:
                raise ApiError(400, f"{seq_id} was already used for another request of this model.", field="seq_id")
            return promise
        if self._closed:
            raise ApiError(404, self._closed, field="model_id")
        promise = self._promises.create(self._owner)
        self._known[seq_id] = digest, promise
        if seq_id < self._next:
            promise.resolve(RequestFailure(f"request {seq_id} arrived after request {self._next - 1} was processed."))
        else:
            self._waiting[seq_id] = _Waiting(promise, work)
            self._changed.set()
        return promise

    async def close(self, reason: str) -> None:
        """End the running request, and fail all others."""
        self._closed = reason
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for each in self._waiting.values():
            each.promise.resolve(RequestFailure(reason))
        self._waiting.clear()

    async def _run(self) -> None:
        while True:
            if self._next in self._waiting:
                await self._process(self._waiting.pop(self._next))
                self._next += 1
                continue
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._gap_timeout_s if self._waiting else None)
            except TimeoutError:
                self._skip_gap()

    async def _process(self, each: _Waiting) -> None:
        try:
            each.promise.resolve(await each.work())
        except asyncio.CancelledError:
            each.promise.resolve(RequestFailure(self._closed or "the server was stopped.", "server"))
            raise
        except Exception as error:
            each.promise.resolve(describe_failure(error))

    def _skip_gap(self) -> None:
        """Fail the first waiting request, because an earlier one is missing, and continue after it."""
        first = min(self._waiting)
        missing = f"{self._next}" if first == self._next + 1 else f"{self._next} to {first - 1}"
        message = f"request {first} failed: request {missing} of this model did not arrive within "
        message += f"{self._gap_timeout_s:g} s."
        self._on_gap(message)
        self._waiting.pop(first).promise.resolve(RequestFailure(message))
        self._next = first + 1
