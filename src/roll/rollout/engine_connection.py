"""All calls to one engine: each call ends, even if the engine dies or hangs.

    caller ──► call, a task of the link's own ──► engine
       ▲                  │
       └── its answer ◄───┴── or EngineDiedError, as soon as the engine is lost: it died, or it hangs

    caller is canceled ──► orphan ──abort, and again──► the engine releases it ──► its slot is free

Invariants:
    - a call belongs to the link: canceling the caller ends neither the call nor the link's record of it;
    - a request counts as the engine's until the engine has released it: it answered, or the engine is lost;
    - after `lose`, no caller waits for the engine any more, and its late answers are ignored;
    - an engine that owes an answer and makes no step for longer than its pace allows (`Pace`) is lost. A paused engine
      owes no tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from roll.errors import EngineDiedError, InfraError
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.hang_detector import LOOK_S, HangDetector
from roll.types import Generation, GenerationRequest

__all__ = ["EngineConnection"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ABORT_AGAIN_S = 1.0
"""Time after an acknowledged abort before the abort is repeated."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that the engine has not answered."""

    task: asyncio.Task[Any]
    answer: asyncio.Future[Any]
    request_id: str = ""
    """Id of a generation request; empty for any other call."""
    on_end: Callable[[], None] | None = None
    gone: asyncio.Future[None] | None = None
    """For an orphan: done once the engine has released the request."""


class EngineConnection:
    """The connection through which all calls to one engine go, until the engine is lost.

    Args:
        engine: The engine.
        on_lost: Called once when the engine is lost.
    """

    def __init__(self, engine: InferenceEngine, on_lost: Callable[[EngineConnection], None]) -> None:
        self.engine = engine
        self.lost: EngineDiedError | None = None
        """Why the engine is lost; `None` while it is in use."""
        self.hangs = False
        """Whether the engine was lost because it made no progress."""
        self.has_answered = False
        """Whether the engine has completed a generation."""
        self._on_lost = on_lost
        self._calls: dict[asyncio.Task[Any], _Call] = {}
        self._num_requests = 0
        self._orphans: set[_Call] = set()
        self._sweeper: asyncio.Handle | None = None
        self._paused = False
        self._in_order = asyncio.Lock()
        self._pace = HangDetector(0.0)
        self._watching: asyncio.TimerHandle | None = None

    # ---- calls

    async def generate(self, request: GenerationRequest, on_end: Callable[[], None]) -> Generation:
        """Run a request; if the caller is canceled, the request is aborted at the engine.

        Args:
            request: A request with an id that is unique among those in progress; an orphan of the same id ends first.
            on_end: Called once, when the engine has released the request.

        Raises:
            EngineDiedError: The engine is lost.
        """
        try:
            await self.end_orphan(request.request_id)
            call = self._begin(self.engine.generate(request), request.request_id, on_end)
        except BaseException:
            on_end()
            raise
        try:
            generation = await call.answer
        except asyncio.CancelledError:
            if call.task in self._calls:
                self._mark_orphan(call)
            raise
        self.has_answered = True
        return generation

    async def end_orphan(self, request_id: str) -> None:
        """Wait until the engine has released an earlier request of this id whose caller was canceled."""
        await self._engine_lost([call for call in self._orphans if call.request_id == request_id])

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `InferenceEngine.abort`. Like all calls, it raises `EngineDiedError` if the engine is lost."""
        await self._begin(self.engine.abort(request_ids)).answer

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceEngine.pause`."""
        await self._begin(self._run_serially(lambda: self.engine.pause(mode), paused=True)).answer

    async def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        await self._begin(self._run_serially(self.engine.resume, paused=False)).answer

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await any other call to the engine."""
        return await self._begin(work).answer

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._paused

    async def abort_all(self) -> None:
        """Abort every request that the engine has."""
        ids = [call.request_id for call in self._calls.values() if call.request_id]
        if ids:
            await self.abort(ids)

    async def end_orphans(self) -> None:
        """Wait until the engine has released every request whose caller was canceled so far."""
        await self._engine_lost(list(self._orphans))

    def lose(self, error: EngineDiedError) -> None:
        """Mark the engine as lost: every pending call to it raises the error."""
        if self.lost is not None:
            return
        self.lost = error
        self._stop_timers()
        self._on_lost(self)  # first, so that slots released below are not given to this engine again
        calls, self._calls = self._calls, {}
        for task, call in calls.items():
            task.cancel()
            if not call.answer.done():
                call.answer.set_exception(self._on_death())
                call.answer.exception()  # marks it as retrieved: the caller may just have been canceled
            self._release_call(call)

    def close(self) -> None:
        """Stop watching the engine; called when the run ends."""
        self._stop_timers()

    def _begin(
        self, work: Coroutine[Any, Any, T], request_id: str = "", on_end: Callable[[], None] | None = None
    ) -> _Call:
        if self.lost is not None:
            work.close()
            raise self._on_death()
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        call = self._calls[task] = _Call(task, loop.create_future(), request_id, on_end)
        self._num_requests += bool(request_id)
        task.add_done_callback(self._on_reply)
        self._watch()
        return call

    def _on_reply(self, task: asyncio.Task[Any]) -> None:
        call = self._calls.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if call is None:  # the engine was lost before
            return
        if not call.answer.done():
            if task.cancelled():
                error = InfraError(f"engine {self.engine.engine_id} canceled a call that no caller had canceled")
            if error is not None:
                call.answer.set_exception(error)
                call.answer.exception()
            else:
                call.answer.set_result(task.result())
        self._release_call(call)
        if isinstance(error, EngineDiedError):
            self.lose(error)

    def _release_call(self, call: _Call) -> None:
        """Release the resources of a call that the engine no longer works on."""
        self._num_requests -= bool(call.request_id)
        self._orphans.discard(call)
        if call.gone is not None:
            call.gone.set_result(None)
        if call.on_end is not None:
            call.on_end()

    async def _run_serially(self, work: Callable[[], Awaitable[None]], *, paused: bool) -> None:
        """Run pauses and resumes in the order of their calls, even if a caller was canceled."""
        async with self._in_order:
            await work()
        self._paused = paused
        if not paused:
            self._pace.begin(asyncio.get_running_loop().time())

    def _on_death(self) -> EngineDiedError:
        assert self.lost is not None, "the engine is lost"
        return EngineDiedError(self.lost.engine_id, self.lost.cause)

    # ---- requests whose callers were canceled

    def _mark_orphan(self, call: _Call) -> None:
        call.gone = asyncio.get_running_loop().create_future()
        self._orphans.add(call)
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeper = asyncio.get_running_loop().call_soon(self._abort_orphans)

    def _abort_orphans(self) -> None:
        """Abort all orphans at the engine."""
        self._sweeper = None
        if self._orphans and self.lost is None:
            ids = [call.request_id for call in self._orphans]
            self._begin(self.engine.abort(ids)).answer.add_done_callback(self._schedule_abort)

    def _schedule_abort(self, answer: asyncio.Future[None]) -> None:
        """Schedule another abort while orphans are left: an abort may reach the engine before its request does."""
        if answer.cancelled() or self.lost is not None:
            return
        if (error := answer.exception()) is not None:
            logger.warning("engine %s could not abort requests: %s", self.engine.engine_id, error)
        if self._orphans and self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(ABORT_AGAIN_S, self._abort_orphans)

    @staticmethod
    async def _engine_lost(calls: Collection[_Call]) -> None:
        waiting = [call.gone for call in calls if call.gone is not None]
        if waiting:
            await asyncio.wait(waiting)  # unlike `gather`, does not cancel the futures with the caller

    # ---- hang detection

    @property
    def _has_pending_reply(self) -> bool:
        """Whether the engine owes an answer: tokens, unless it is paused, or the result of another call."""
        return len(self._calls) > self._num_requests or bool(self._num_requests and not self._paused)

    def _watch(self) -> None:
        if self._watching is None:
            loop = asyncio.get_running_loop()
            self._pace.begin(loop.time())
            self._watching = loop.call_later(LOOK_S, self._look, loop.time() + LOOK_S)

    def _look(self, due: float) -> None:
        self._watching = None
        if not self._has_pending_reply or self.lost is not None:
            return
        loop = asyncio.get_running_loop()
        now, steps = loop.time(), self.engine.load().num_steps
        if steps is None and len(self._calls) == self._num_requests:
            self._pace.begin(now)  # the engine does not report steps, so progress on requests is unknown
        if self._pace.observe(now, steps or 0, late_s=now - due):
            self.hangs = True
            slowest = self._pace.slowest_s
            pace = f"its slowest took {slowest:.0f} s" if slowest else "it has made none yet"
            self.lose(
                EngineDiedError(
                    self.engine.engine_id,
                    f"it hangs: no step for {now - self._pace.since:.0f} s ({pace}), while it has "
                    f"{self._num_requests} requests",
                )
            )
            return
        self._watching = loop.call_later(LOOK_S, self._look, now + LOOK_S)

    def _stop_timers(self) -> None:
        for timer in (self._watching, self._sweeper):
            if timer is not None:
                timer.cancel()
