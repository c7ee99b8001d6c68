"""EngineTransitions: engines that join, leave, sleep and wake while the others go on.

    leaves:  nothing is routed to it ──► its requests go on elsewhere ──► it sleeps, or ends
    comes:   it starts, or wakes ──► it gets the current weights ──► requests are routed to it

Invariants:
    - the order is the one above: an engine that leaves first gets no request again, so that those which it gives up are
      never sent back to it; one that comes has the current weights before it gets any;
    - nothing is started in the place of an engine that is away: its devices are others';
    - an engine that decodes stops and goes on with all others, also while it is about to leave, and when it comes back;
    - a step of one engine fails for that engine alone, which the fleet then replaces when it is let back;
    - steps of one engine follow each other, and none begins between `sleep_all` and `wake_all`;
    - a step is no task of its caller's: cancelling the caller ends only the start of an engine that is added.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Literal, TypeAlias

from roll.errors import EngineDiedError, InfraError, UnsupportedError
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.engine_group import EngineGroup
from roll.rollout.engine_link import ABORT_AGAIN_S, EngineLink
from roll.rollout.fleet import EngineFleet
from roll.rollout.routing import Router
from roll.running import is_cancelled

__all__ = ["EngineTransitions", "Leaving"]

logger = logging.getLogger(__name__)

Leaving: TypeAlias = Literal["abort", "drain"]
"""How an engine gives up its requests: they go on elsewhere, from the tokens that they have; or it finishes them."""
Step: TypeAlias = asyncio.Task[None]


class EngineTransitions:
    """Moves single engines, or all at once.

    Args:
        engines: the group.
        fleet: of it.
        router: told by the fleet which engines serve; knows when one has no requests.
        prepare: brings an engine to the current weights.
        suspended: says how all engines are suspended now; `None`: they are not.
        in_step: held while all of them stop or go on.
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
        """Entered while an engine falls asleep: no weights are on their way to it."""
        self._engines = engines
        self._fleet = fleet
        self._router = router
        self._prepare = prepare
        self._suspended = suspended
        self._in_step = in_step
        self._closed = False
        self._steps: dict[str, Step] = {}
        """By engine, the last step that was asked for, until it has ended."""
        self._under_way: set[Step] = set()
        """Steps that began."""
        self._asleep: set[str] = set()
        """Engines that sleep by themselves."""
        self._unsynced: set[str] = set()
        """Of the engines that are kept away, those that have slept and got no weights since."""

    async def add(self, engine_id: str, make: Callable[[], InferenceEngine]) -> None:
        """Start a further engine, and bring it to the current weights; then it serves.

        Args:
            engine_id: no other engine has it.
            make: makes it; called again whenever it is replaced.

        Raises:
            Exception: whatever its start raised; the group is then as before.
        """
        step = self._begin(engine_id, lambda: self._add(engine_id, make), held=False)
        try:
            await _ended(step)
        except asyncio.CancelledError:
            step.cancel()
            await asyncio.wait({step})
            raise

    async def retire(self, engine_id: str, leaving: Leaving = "abort") -> None:
        """End an engine for good, after it has given up its requests; they wait where no other is left."""
        await _ended(self._begin(engine_id, lambda: self._retire(engine_id, leaving)))

    async def sleep(self, engine_id: str, leaving: Leaving = "abort") -> None:
        """Let an engine give its memory back until `wake`, after it has given up its requests.

        One that dies meanwhile is replaced when it is woken.

        Raises:
            UnsupportedError: it cannot do it here; it serves again.
        """
        await _ended(self._begin(engine_id, lambda: self._sleep(engine_id, leaving)))

    async def wake(self, engine_id: str) -> None:
        """Let an engine take its memory again, and bring it to the current weights; then it serves."""
        await _ended(self._begin(engine_id, lambda: self._come_back(engine_id)))

    async def suspend(self, engine_id: str, mode: PauseMode) -> None:
        """Stop one engine's decoding until `resume`; it gets no requests meanwhile. It keeps its memory, unless all
        fall asleep.
        """
        await _ended(self._begin(engine_id, lambda: self._suspend(engine_id, mode)))

    async def resume(self, engine_id: str) -> None:
        """Let one engine decode again, as soon as all others do."""
        await _ended(self._begin(engine_id, lambda: self._come_back(engine_id)))

    async def sleep_all(self) -> None:
        """Let every engine that is there give its memory back; nothing may be asked of them before `wake_all`."""
        while self._under_way:
            await asyncio.wait(self._under_way)
        links = self._fleet.links(without=self._asleep)
        self._unsynced |= {link.engine.engine_id for link in links if not self._fleet.serves(link)}
        await asyncio.gather(*(_unless_lost(link, self._engines.sleep) for link in links))

    async def wake_all(self) -> None:
        """Let them take it again; they need a weight sync before they answer."""
        links = self._fleet.links(without=self._asleep)
        await asyncio.gather(*(_unless_lost(link, self._engines.wake) for link in links))

    async def close(self) -> None:
        """End all steps where they are, and begin no more."""
        self._closed = True
        for step in (steps := set(self._steps.values()) | self._under_way):
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    # ---- steps

    def _begin(self, engine_id: str, work: Callable[[], Coroutine[Any, Any, None]], *, held: bool = True) -> Step:
        """Begin a step after the one before it; one that is `held`, only while not all engines sleep."""
        if self._closed:
            raise InfraError(f"engine {engine_id} neither comes nor goes any more: the engines were closed")
        before = self._steps.get(engine_id)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            if held:
                await self._fleet.may_change()
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
        await self._fleet.keep_away(engine_id)
        await self._vacate(engine_id, leaving)
        await self._fleet.forget(engine_id)
        self._awake(engine_id)
        await self._engines.retire(engine_id)

    async def _sleep(self, engine_id: str, leaving: Leaving) -> None:
        await self._fleet.keep_away(engine_id)
        await self._vacate(engine_id, leaving)
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
        await self._fleet.keep_away(engine_id)
        if mode != "keep":  # also of a request that is on its way to it
            await self._vacate(engine_id, mode)
        async with self._in_step:
            self._fleet.standing.add(engine_id)
            with suppress(EngineDiedError):
                await self._fleet.link(engine_id).pause(mode)

    async def _come_back(self, engine_id: str) -> None:
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

    async def _let_back(self, link: EngineLink) -> None:
        """Let an engine decode, or stand still, as all others do; then it serves."""
        async with self._in_step:
            mode = self._suspended()
            with suppress(EngineDiedError):
                if link.is_paused != (mode is not None):
                    await (link.resume() if mode is None else link.pause(mode))
            self._fleet.standing.discard(link.engine.engine_id)
            self._fleet.let_back(link.engine.engine_id)

    async def _vacate(self, engine_id: str, leaving: Leaving) -> None:
        """Wait until an engine, to which nothing is routed any more, has no requests."""
        link, idle = self._fleet.link(engine_id), self._router.when_idle(engine_id)
        while not idle.done():
            if leaving == "abort":  # again and again, since an abort may come before its request
                with suppress(EngineDiedError):
                    await link.abort_all()
            await asyncio.wait({idle}, timeout=ABORT_AGAIN_S)


async def _unless_lost(link: EngineLink, move: Callable[[InferenceEngine], Coroutine[Any, Any, None]]) -> None:
    """Move an engine; one that is lost needs it no more."""
    with suppress(EngineDiedError):
        await link.call(move(link.engine))


async def _ended(step: Step) -> None:
    """Wait for a step, which goes on where its caller is cancelled."""
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
