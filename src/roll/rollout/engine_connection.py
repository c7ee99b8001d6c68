"""The connection to one engine: every call returns or raises an error, even if the engine dies or hangs.

    caller ──► call, a task of the connection ──► engine
       ▲                  │
       └──── answer ◄─────┴── or EngineDiedError, as soon as the engine is lost: it died, or it hangs

    caller is canceled ──► orphan ──abort, and again──► the engine releases it ──► its slot is free

Invariants:
    - a call belongs to the connection: if its caller is canceled, the call continues and is still tracked;
    - a request occupies its slot until the engine has released it by an answer, or the engine is lost;
    - after `mark_lost`, no caller waits for the engine any more, and its late answers are ignored;
    - an engine that fails to pause, resume, sleep or wake is lost, because its state is unknown;
    - an engine with pending calls that makes no step within a timeout derived from its recent steps (`HangDetector`) is
      lost. While an engine is paused, its generation requests are not treated as pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from roll.errors import EngineDiedError, InfraError, one_line_error
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.hang_detector import CHECK_INTERVAL_S, HangDetector
from roll.rollout.pace import ActivityClock, AnswerLatency
from roll.types import Generation, GenerationRequest

__all__ = ["EngineConnection"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ABORT_RETRY_S = 1.0
"""Interval between repeated aborts of a request, in seconds."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that the engine has not answered yet."""

    task: asyncio.Task[Any]
    answer: asyncio.Future[Any]
    request_id: str = ""
    """Id of a generation request; an empty string for other calls."""
    changes_state: bool = False
    """True for calls after whose failure the engine's state is unknown."""
    on_end: Callable[[], None] | None = None
    released: asyncio.Future[None] | None = None
    """Future of an orphan (a request whose caller was canceled); done when the engine has released the request."""


class EngineConnection:
    """The connection for all calls to one engine, until the engine is lost.

    Args:
        engine: The engine.
        on_lost: Called once when the engine is lost.
        on_answer: Called with the engine's id and the time of every answer.
        is_preemptible: Whether the engine's node may leave at any time.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        on_lost: Callable[[EngineConnection], None],
        on_answer: Callable[[str, AnswerLatency], None] = lambda engine_id, answer: None,
        *,
        is_preemptible: bool = False,
    ) -> None:
        self.engine = engine
        self.is_preemptible = is_preemptible
        """True if the loss of the engine is not treated as a failed attempt at its requests."""
        self.lost: EngineDiedError | None = None
        """Error because of which the engine is lost; `None` while it is in use."""
        self.hangs = False
        """True if the engine was lost because it made no progress."""
        self.has_answered = False
        """True if the engine has completed a generation."""
        self._on_lost = on_lost
        self._on_answer = on_answer
        self._activity = ActivityClock()
        self._calls: dict[asyncio.Task[Any], _Call] = {}
        self._num_requests = 0
        self._orphans: set[_Call] = set()
        self._abort_timer: asyncio.Handle | None = None
        self._paused = False
        self._in_order = asyncio.Lock()
        self._hang_detector = HangDetector(0.0)
        self._watching: asyncio.TimerHandle | None = None

    # ---- calls

    async def generate(self, request: GenerationRequest, on_end: Callable[[], None], domain: str = "") -> Generation:
        """Run a request; if the caller is canceled, the request is aborted at the engine.

        Args:
            request: A request with a unique id. If an earlier request with this id was canceled, the new request waits
                until the engine has released the earlier request.
            on_end: Called once, when the engine has released the request.
            domain: Domain of the request's prompt, for the measurement of its time.

        Raises:
            EngineDiedError: The engine is lost.
        """
        try:
            await self.wait_for_orphaned_request(request.request_id)
            call = self._begin(self.engine.generate(request), request.request_id, on_end)
        except BaseException:
            on_end()
            raise
        began_s, request_s = self._advance_activity()
        try:
            generation = await call.answer
        except asyncio.CancelledError:
            if call.task in self._calls:
                self._mark_orphan(call)
            raise
        self.has_answered = True
        ended_s, ended_request_s = self._advance_activity()
        if (seconds := ended_s - began_s) > 0:
            mean_requests = (ended_request_s - request_s) / seconds
            answer = AnswerLatency(
                num_tokens=len(generation.token_ids), seconds=seconds, mean_requests=mean_requests, domain=domain
            )
            self._on_answer(self.engine.engine_id, answer)
        return generation

    async def wait_for_orphaned_request(self, request_id: str) -> None:
        """Wait until the engine has released an earlier request with this id whose caller was canceled."""
        await self._wait_for_release([call for call in self._orphans if call.request_id == request_id])

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests immediately. If the engine cannot abort them, they run to their end.

        Raises:
            EngineDiedError: The engine is lost.
        """
        try:
            await self._begin(self.engine.abort(request_ids)).answer
        except EngineDiedError:
            raise
        except InfraError as error:
            self._log_failed_abort(error)

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine; see `InferenceEngine.pause`."""
        await self.call(self._run_serially(lambda: self.engine.pause(mode), paused=True))

    async def resume(self) -> None:
        """Resume the engine; see `InferenceEngine.resume`."""
        await self.call(self._run_serially(self.engine.resume, paused=False))

    async def call(self, coroutine: Coroutine[Any, Any, T], *, changes_state: bool = True) -> T:
        """Await a call that is not a generation request.

        Args:
            coroutine: The call.
            changes_state: True for calls such as `sleep` or `wake`, after whose failure the engine's state is unknown.

        Raises:
            EngineDiedError: The engine is lost, also because a call that changes its state ended with an `InfraError`.
        """
        return await self._begin(coroutine, changes_state=changes_state).answer

    @property
    def is_paused(self) -> bool:
        """True if the engine is paused."""
        return self._paused

    async def abort_all(self) -> None:
        """Abort every request of the engine."""
        ids = [call.request_id for call in self._calls.values() if call.request_id]
        if ids:
            await self.abort(ids)

    async def wait_for_orphaned_requests(self) -> None:
        """Wait until the engine has released every request whose caller has been canceled."""
        await self._wait_for_release(list(self._orphans))

    def mark_lost(self, error: EngineDiedError) -> None:
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
                call.answer.set_exception(self._build_death_error())
                call.answer.exception()  # marks it as retrieved: the caller may just have been canceled
            self._release_call(call)

    def close(self) -> None:
        """Stop the timers of hang detection and aborts; called when the run ends."""
        self._stop_timers()

    def _begin(
        self,
        coroutine: Coroutine[Any, Any, T],
        request_id: str = "",
        on_end: Callable[[], None] | None = None,
        *,
        changes_state: bool = False,
    ) -> _Call:
        if self.lost is not None:
            coroutine.close()
            raise self._build_death_error()
        self._advance_activity()
        loop = asyncio.get_running_loop()
        task = loop.create_task(coroutine)
        call = self._calls[task] = _Call(task, loop.create_future(), request_id, changes_state, on_end)
        self._num_requests += bool(request_id)
        task.add_done_callback(self._on_reply)
        self._start_watching()
        return call

    def _on_reply(self, task: asyncio.Task[Any]) -> None:
        call = self._calls.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if call is None:  # `mark_lost` has already answered the caller
            return
        if call.changes_state and isinstance(error, InfraError) and not isinstance(error, EngineDiedError):
            error = EngineDiedError(self.engine.engine_id, one_line_error(error))
        if not call.answer.done():
            if task.cancelled():
                error = InfraError(f"engine '{self.engine.engine_id}' canceled a call that its caller did not cancel")
            if error is not None:
                call.answer.set_exception(error)
                call.answer.exception()
            else:
                call.answer.set_result(task.result())
        self._release_call(call)
        if isinstance(error, EngineDiedError):
            self.mark_lost(error)

    def _release_call(self, call: _Call) -> None:
        """Count a call as ended, mark its request as released, and call its `on_end`."""
        self._advance_activity()
        self._num_requests -= bool(call.request_id)
        self._orphans.discard(call)
        if call.released is not None:
            call.released.set_result(None)
        if call.on_end is not None:
            call.on_end()

    async def _run_serially(self, work: Callable[[], Awaitable[None]], *, paused: bool) -> None:
        """Run `work` (a pause or a resume) after all earlier pauses and resumes, even those of canceled callers."""
        # A canceled pause still runs, so a later resume must not overtake it: the engine would stay paused.
        async with self._in_order:
            await work()
        self._advance_activity()
        self._paused = paused
        if not paused:
            self._hang_detector.restart_timeout(asyncio.get_running_loop().time())

    def _advance_activity(self) -> tuple[float, float]:
        """Count the time until now; called before the number of requests, or the pause, changes.

        Returns:
            The active time of the engine, and the active time of all its requests.
        """
        return self._activity.advance(self._num_requests, paused=self._paused)

    def _build_death_error(self) -> EngineDiedError:
        assert self.lost is not None, "the engine is lost"
        return EngineDiedError(self.lost.engine_id, self.lost.cause)

    # ---- requests whose callers were canceled

    def _mark_orphan(self, call: _Call) -> None:
        call.released = asyncio.get_running_loop().create_future()
        self._orphans.add(call)
        # In the next iteration of the event loop, so that all requests of a stopped group are aborted with one call.
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._abort_timer = asyncio.get_running_loop().call_soon(self._abort_orphans)

    def _abort_orphans(self) -> None:
        """Abort all requests at the engine whose callers were canceled (orphans)."""
        self._abort_timer = None
        if self._orphans and self.lost is None:
            ids = [call.request_id for call in self._orphans]
            self._begin(self.engine.abort(ids)).answer.add_done_callback(self._schedule_abort)

    def _schedule_abort(self, answer: asyncio.Future[None]) -> None:
        """Log the error of an abort that has ended, if any; schedule another abort while there are orphans.

        An abort is repeated because it may reach the engine before the request.
        """
        if answer.cancelled() or self.lost is not None:
            return
        if (error := answer.exception()) is not None:
            self._log_failed_abort(error)
        if self._orphans and self._abort_timer is None:
            self._abort_timer = asyncio.get_running_loop().call_later(ABORT_RETRY_S, self._abort_orphans)

    def _log_failed_abort(self, error: BaseException) -> None:
        logger.warning("engine %s could not abort requests: %s", self.engine.engine_id, one_line_error(error))

    @staticmethod
    async def _wait_for_release(calls: Collection[_Call]) -> None:
        """Wait until the engine has released every call in `calls` whose caller was canceled, or until the engine is
        lost.
        """
        waiting = [call.released for call in calls if call.released is not None]
        if waiting:
            await asyncio.wait(waiting)  # unlike `gather`, does not cancel the futures with the caller

    # ---- hang detection

    @property
    def _has_pending_reply(self) -> bool:
        """True if the engine should answer: it has a generation request and is not paused, or it has another call."""
        return len(self._calls) > self._num_requests or bool(self._num_requests and not self._paused)

    def _start_watching(self) -> None:
        if self._watching is None:
            loop = asyncio.get_running_loop()
            self._hang_detector.restart_timeout(loop.time())
            self._watching = loop.call_later(CHECK_INTERVAL_S, self._check_progress, loop.time() + CHECK_INTERVAL_S)

    def _check_progress(self, due: float) -> None:
        self._watching = None
        if not self._has_pending_reply or self.lost is not None:
            return
        loop = asyncio.get_running_loop()
        now, steps = loop.time(), self.engine.load().num_steps
        if steps is None and len(self._calls) == self._num_requests:
            self._hang_detector.restart_timeout(now)  # the engine does not report steps, so its progress is unknown
        if self._hang_detector.observe(now, steps or 0, delay_s=now - due):
            self.hangs = True
            slowest = self._hang_detector.slowest_s
            pace = f"its slowest took {slowest:.0f} s" if slowest else "it has not made any step yet"
            self.mark_lost(
                EngineDiedError(
                    self.engine.engine_id,
                    f"the engine hangs: no step for {now - self._hang_detector.last_progress:.0f} s ({pace}), with "
                    f"{self._num_requests} requests",
                )
            )
            return
        self._watching = loop.call_later(CHECK_INTERVAL_S, self._check_progress, now + CHECK_INTERVAL_S)

    def _stop_timers(self) -> None:
        for timer in (self._watching, self._abort_timer):
            if timer is not None:
                timer.cancel()
