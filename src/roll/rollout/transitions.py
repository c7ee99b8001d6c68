"""EngineTransitions: single engines join, leave, sleep and wake while the others continue.

    leaves:  nothing is routed to it ──► its requests continue elsewhere ──► it sleeps, or shuts down
    joins:   it starts, or wakes ──► it gets the current weights ──► requests are routed to it

Invariants:
    - the order is the one above: routing to a leaving engine stops first, so that the requests it gives up are never
      sent back to it; a joining engine has the current weights before it gets any request;
    - an engine that is away is not replaced: its devices are used by others;
    - an engine that decodes is paused and resumed together with all others, also while it leaves and when it returns;
    - a failed transition affects only its engine, which the fleet replaces when the engine is let back;
    - transitions of one engine run one after another, and none begins between `sleep_all` and `wake_all`;
    - a transition is not a task of its caller: canceling the caller ends only the start of an engine that is added.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Literal, TypeAlias

from roll.errors import EngineDiedError, InfraError, UnsupportedError
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.engine_connection import ABORT_AGAIN_S, EngineConnection
from roll.rollout.engine_group import EngineGroup
from roll.rollout.fleet import EngineFleet
from roll.rollout.routing import Router
from roll.running import is_cancelled

__all__ = ["EngineTransitions", "Leaving"]

logger = logging.getLogger(__name__)

Leaving: TypeAlias = Literal["abort", "drain"]
"""How an engine gives up its requests: `abort` continues them elsewhere from their tokens, `drain` finishes them."""
Step: TypeAlias = asyncio.Task[None]


class EngineTransitions:
    """Adds, removes, puts to sleep and wakes engines, one by one or all at once.

    Args:
        engines: The engine group.
        fleet: The fleet of the group.
        router: Router of the fleet, from which this class learns when an engine has no requests.
        prepare: Syncs the current weights to an engine.
        suspended: Returns the mode in which all engines are suspended; `None` if they are not.
        in_step: Lock that is held while all engines pause or resume.
    """

    def __init__(
        self,
        engines: EngineGroup,
        fleet: EngineFleet,
        router: Router,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        suspended: Callable[[], PauseMode | None],
        in_step: asyncio.Lock,
    ) -> None:
        self.between_syncs: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
        """Context in which an engine goes to sleep, so that no weight sync to it is in progress."""
        self._engines = engines
        self._fleet = fleet
        self._router = router
        self._prepare = prepare
        self._suspended = suspended
        self._in_step = in_step
        self._closed = False
        self._steps: dict[str, Step] = {}
        """By engine: the last transition that was requested, until it has ended."""
        self._under_way: set[Step] = set()
        """Transitions that have begun."""
        self._asleep: set[str] = set()
        """Engines that were put to sleep individually."""
        self._unsynced: set[str] = set()
        """Engines that are kept away and have not got weights since they slept."""

    async def add(self, engine_id: str, make: Callable[[], InferenceEngine]) -> None:
        """Start another engine and sync the current weights to it; then it serves.

        Args:
            engine_id: Unique id of the engine.
            make: Builds the engine; called again whenever the engine is replaced.

        Raises:
            Exception: The start failed; the group is then unchanged.
        """
        step = self._begin(engine_id, lambda: self._add(engine_id, make), held=False)
        try:
            await _wait_shielded(step)
        except asyncio.CancelledError:
            step.cancel()
            await asyncio.wait({step})
            raise

    async def retire(self, engine_id: str, leaving: Leaving = "abort") -> None:
        """Remove an engine permanently, after it has given up its requests; they wait if no other engine is left."""
        await _wait_shielded(self._begin(engine_id, lambda: self._retire(engine_id, leaving)))

    async def sleep(self, engine_id: str, leaving: Leaving = "abort") -> None:
        """Put an engine to sleep until `wake`, which frees its device memory, after it has given up its requests.

        An engine that dies while asleep is replaced when it is woken.

        Raises:
            UnsupportedError: The engine does not support sleep here; it serves again.
        """
        await _wait_shielded(self._begin(engine_id, lambda: self._sleep(engine_id, leaving)))

    async def wake(self, engine_id: str) -> None:
        """Wake an engine and sync the current weights to it; then it serves."""
        await _wait_shielded(self._begin(engine_id, lambda: self._return_to_service(engine_id)))

    async def suspend(self, engine_id: str, mode: PauseMode) -> None:
        """Pause one engine until `resume`; it gets no requests meanwhile.

        The engine keeps its device memory unless all engines are put to sleep.
        """
        await _wait_shielded(self._begin(engine_id, lambda: self._suspend(engine_id, mode)))

    async def resume(self, engine_id: str) -> None:
        """Resume one engine, as soon as all others decode."""
        await _wait_shielded(self._begin(engine_id, lambda: self._return_to_service(engine_id)))

    async def sleep_all(self) -> None:
        """Put every awake engine to sleep; engines must not be called before `wake_all`."""
        while self._under_way:
            await asyncio.wait(self._under_way)
        links = self._fleet.links(without=self._asleep)
        self._unsynced |= {link.engine.engine_id for link in links if not self._fleet.is_serving(link)}
        await asyncio.gather(*(_unless_lost(link, self._engines.sleep) for link in links))

    async def wake_all(self) -> None:
        """Wake the engines that `sleep_all` put to sleep; they need a weight sync before they answer."""
        links = self._fleet.links(without=self._asleep)
        await asyncio.gather(*(_unless_lost(link, self._engines.wake) for link in links))

    async def close(self) -> None:
        """Cancel all transitions, and refuse new ones."""
        self._closed = True
        for step in (steps := set(self._steps.values()) | self._under_way):
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    # ---- steps

    def _begin(self, engine_id: str, work: Callable[[], Coroutine[Any, Any, None]], *, held: bool = True) -> Step:
        """Start a transition after the engine's previous one; with `held`, only while not all engines are asleep."""
        if self._closed:
            raise InfraError(f"engine {engine_id} neither comes nor goes any more: the engines were closed")
        before = self._steps.get(engine_id)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            if held:
                await self._fleet.wait_until_starts_allowed()
                self._under_way.add(step)
            await work()

        def end(step: Step) -> None:
            self._under_way.discard(step)
            if self._steps.get(engine_id) is step:
                del self._steps[engine_id]

        step = self._steps[engine_id] = asyncio.create_task(run(), name=f"step-of-{engine_id}")
        step.add_done_callback(end)
        return step

    async def _add(self, engine_id: str, make: Callable[[], InferenceEngine]) -> None:
        self._engines.add(engine_id, make)
        try:
            await self._fleet.start(engine_id)
        except BaseException:
            await self._engines.retire(engine_id)
            raise

    async def _retire(self, engine_id: str, leaving: Leaving) -> None:
        await self._fleet.quarantine(engine_id)
        await self._drain(engine_id, leaving)
        await self._fleet.forget(engine_id)
        self._awake(engine_id)
        await self._engines.retire(engine_id)

    async def _sleep(self, engine_id: str, leaving: Leaving) -> None:
        await self._fleet.quarantine(engine_id)
        await self._drain(engine_id, leaving)
        self._asleep.add(engine_id)
        self._unsynced.add(engine_id)
        try:
            async with self.between_syncs(), self._in_step:
                self._fleet.standing.add(engine_id)
                await _unless_lost(self._fleet.link(engine_id), self._engines.sleep)
        except UnsupportedError:
            self._awake(engine_id)
            await self._let_back(self._fleet.link(engine_id))
            raise

    async def _suspend(self, engine_id: str, mode: PauseMode) -> None:
        await self._fleet.quarantine(engine_id)
        if mode != "keep":  # including a request that is being sent to it
            await self._drain(engine_id, mode)
        async with self._in_step:
            self._fleet.standing.add(engine_id)
            with suppress(EngineDiedError):
                await self._fleet.link(engine_id).pause(mode)

    async def _return_to_service(self, engine_id: str) -> None:
        link = self._fleet.link(engine_id)
        try:
            if engine_id in self._asleep:
                await link.call(self._engines.wake(link.engine))
                self._asleep.discard(engine_id)
            if engine_id in self._unsynced:
                await self._prepare(link.engine)
        except EngineDiedError as error:
            link.lose(error)
        self._awake(engine_id)
        await self._let_back(link)

    def _awake(self, engine_id: str) -> None:
        self._asleep.discard(engine_id)
        self._unsynced.discard(engine_id)

    async def _let_back(self, link: EngineConnection) -> None:
        """Pause or resume an engine as all others are; then it serves."""
        async with self._in_step:
            mode = self._suspended()
            with suppress(EngineDiedError):
                if link.is_paused != (mode is not None):
                    await (link.resume() if mode is None else link.pause(mode))
            self._fleet.standing.discard(link.engine.engine_id)
            self._fleet.readmit(link.engine.engine_id)

    async def _drain(self, engine_id: str, leaving: Leaving) -> None:
        """Wait until an engine to which nothing is routed any more has no requests."""
        link, idle = self._fleet.link(engine_id), self._router.when_idle(engine_id)
        while not idle.done():
            if leaving == "abort":  # repeated, since an abort may reach the engine before its request
                with suppress(EngineDiedError):
                    await link.abort_all()
            await asyncio.wait({idle}, timeout=ABORT_AGAIN_S)


async def _unless_lost(link: EngineConnection, move: Callable[[InferenceEngine], Coroutine[Any, Any, None]]) -> None:
    """Apply a transition to an engine, unless the engine is lost."""
    with suppress(EngineDiedError):
        await link.call(move(link.engine))


async def _wait_shielded(step: Step) -> None:
    """Wait for a transition, which continues if the caller is canceled."""
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        if step.cancelled() and not is_cancelled():
            raise InfraError(f"{step.get_name()} was not ended, since the engines were closed") from None
        step.add_done_callback(_say_failure)
        raise


def _say_failure(step: Step) -> None:
    if not step.cancelled() and (error := step.exception()) is not None:
        logger.warning("%s failed after its caller was gone: %s", step.get_name(), error)
