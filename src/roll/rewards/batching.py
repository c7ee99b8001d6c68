"""Batching of single requests for scoring.

    submit ──► waiting ──► a free runner takes up to `batch_size` requests ──► results, one by one

No request waits for a batch to fill: the first request is scored immediately, and the requests that arrive in the
meantime form the next batch. Invariants: at most `num_runners` batches run concurrently; a request whose caller was
canceled is not scored; every request gets its own result or the error of its batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from roll.errors import RewardInfraError

__all__ = ["Batcher"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class Batcher(Generic[Item, Result]):
    """Collects single requests into batches for scoring."""

    score: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]
    """Scores a batch, and returns the results in the order of the requests."""
    _: KW_ONLY
    batch_size: int
    """Maximum number of requests in one batch."""
    num_runners: int
    """Maximum number of batches that run concurrently."""
    name: str = "the reward model"
    """Name of the scorer in messages."""
    _waiting: deque[tuple[Item, asyncio.Future[Result]]] = field(init=False, default_factory=deque)
    _runners: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _closed: bool = field(init=False, default=False)

    async def submit(self, item: Item) -> Result:
        """Submit one request and return its result.

        Raises:
            RewardInfraError: The batcher is closed.
            Exception: Any exception that `score` raised for the request's batch.
        """
        if self._closed:
            raise RewardInfraError(f"an answer cannot be scored: {self.name} is already closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._runners) < self.num_runners:
            task = asyncio.create_task(self._run())
            self._runners.add(task)
            task.add_done_callback(self._runners.discard)
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # requests that are submitted in the same turn of the event loop join the batch
        while batch := self._pop_batch():
            try:
                results = await self.score([item for item, _ in batch])
                if len(results) != len(batch):
                    raise RewardInfraError(f"{self.name} returned {len(results)} scores for {len(batch)} answers")
            except asyncio.CancelledError:
                self._fail_batch(batch, RewardInfraError(f"an answer was not scored: {self.name} was closed"))
                raise
            except Exception as error:  # any exception belongs to the callers that wait for this batch
                self._fail_batch(batch, error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result)

    @staticmethod
    def _fail_batch(batch: Sequence[tuple[Item, asyncio.Future[Result]]], error: Exception) -> None:
        for _, future in batch:
            if not future.done():
                future.set_exception(error)

    def _pop_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        while self._waiting and len(batch) < self.batch_size:
            # A future that is done belongs to a caller that was canceled: its request is not scored.
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch

    async def close(self) -> None:
        """Cancel running batches; the callers get a `RewardInfraError`. Calling it twice is safe."""
        self._closed = True
        runners = list(self._runners)
        waiting = list(self._waiting)
        self._waiting.clear()
        for task in runners:
            task.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        self._fail_batch(waiting, RewardInfraError(f"an answer was not scored: {self.name} was closed"))
