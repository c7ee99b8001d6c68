"""EngineStarts: starts engines for the fleet, except detached engines, whose devices others use.

    start ──► wait until it is not detached ──► start the engine ──► sync the weights ──► serve
                   ▲                                   │ it is detached, and the start takes too long
                   └──────────── postponed ◄───────────┘

Invariants:
    - a detached engine is never started;
    - `wait_for_start` waits a limited time for a start in progress. A start that takes longer is canceled, and repeated
      when the engine is reattached, so an engine on a lost node does not stall the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from roll.errors import EngineDiedError
from roll.protocols import InferenceEngine
from roll.rollout.engine_group import EngineGroup

__all__ = ["EngineStarts"]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0
"""Timeout for starting a new engine, in seconds; the weight sync that follows is not included."""
CANCEL_TIMEOUT_S = 60.0
"""Maximum time to wait until the canceled start of an engine has ended, in seconds."""
DETACH_TIMEOUT_S = 120.0
"""Time that `wait_for_start` waits before it cancels the start, in seconds; doubled after each cancellation."""


class EngineStarts:
    """Starts the engines of a group.

    Args:
        engines: The engine group.
        prepare: Syncs the current weights to a new engine before it serves.
        detached: IDs of engines that must not be started. The caller may change this collection, and must then call
            `check_detached`.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        detached: Collection[str],
    ) -> None:
        self._engines = engines
        self._prepare = prepare
        self._detached = detached
        self._changed = asyncio.Event()
        self._starting: dict[str, asyncio.Event] = {}
        self._postponed: dict[str, asyncio.Future[None]] = {}
        """By engine, a future that is resolved when the engine's start is to be postponed."""
        self._num_postponed: Counter[str] = Counter()
        """By engine, the number of starts that were postponed since the engine last served."""
        self._canceled: dict[str, asyncio.Future[InferenceEngine]] = {}

    async def start(self, engine_id: str, serve: Callable[[InferenceEngine], None]) -> None:
        """Start a new engine with this id as soon as it is not detached, and call `serve` with the engine.

        Raises:
            Exception: The start failed.
        """
        fresh = None
        while fresh is None:
            while engine_id in self._detached:
                self._changed.clear()
                await self._changed.wait()
            self._starting[engine_id] = asyncio.Event()
            try:
                fresh = await self._start_or_postpone(engine_id)
                if fresh is not None:
                    # Before it serves, an engine must hold the current policy version.
                    await self._prepare(fresh)
                    self._num_postponed.pop(engine_id, None)
                    serve(fresh)
            except BaseException:
                if fresh is not None:  # it is closed by the next start, until which weight syncs must not wait for it
                    self._engines.exclude(fresh)
                raise
            finally:
                self._starting.pop(engine_id).set()

    def check_detached(self) -> None:
        """Check again which engines are detached; called after an engine has been reattached."""
        self._changed.set()

    async def wait_for_start(self, engine_id: str) -> None:
        """Wait until the start of a detached engine has ended or was postponed; return immediately if it is not being
        started."""
        if engine_id not in self._starting:
            return
        timeout = min(START_TIMEOUT_S, DETACH_TIMEOUT_S * 2 ** self._num_postponed[engine_id])
        timer = asyncio.get_running_loop().call_later(timeout, self._postpone, engine_id, timeout)
        try:
            await self._starting[engine_id].wait()
        finally:
            timer.cancel()
        await self._wait_for_canceled_start(engine_id)

    def _postpone(self, engine_id: str, timeout_s: float) -> None:
        if engine_id not in self._postponed or self._postponed[engine_id].done():  # it has started, and gets weights
            return
        self._num_postponed[engine_id] += 1
        self._postponed[engine_id].set_result(None)
        logger.warning(
            "engine %s has not started within %g s, and its devices are needed: the run continues with the other "
            "engines, and starts this one again later",
            engine_id,
            timeout_s,
        )

    async def _start_or_postpone(self, engine_id: str) -> InferenceEngine | None:
        """Start an engine; return `None` if the start was postponed."""
        start = asyncio.ensure_future(self._replace(engine_id))
        postponed = self._postponed[engine_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({start, postponed}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                if postponed.done():
                    return None
                raise EngineDiedError(engine_id, f"its replacement did not start within {START_TIMEOUT_S:g} s")
        finally:
            del self._postponed[engine_id]
            if start.cancel():  # not awaited, because the start may hang
                self._canceled[engine_id] = start
        return start.result()

    async def _replace(self, engine_id: str) -> InferenceEngine:
        await self._wait_for_canceled_start(engine_id)
        self._canceled.pop(engine_id, None)
        return await self._engines.replace(engine_id)

    async def _wait_for_canceled_start(self, engine_id: str) -> None:
        """Wait until the canceled start of an engine, if any, has freed its devices, but not forever: it may hang."""
        if (canceled := self._canceled.get(engine_id)) is not None:
            await asyncio.wait({canceled}, timeout=CANCEL_TIMEOUT_S)
