"""EngineTransitions: engines join, leave, sleep and wake while the others continue.

    leaves:  routing to it stops ──► its requests continue elsewhere ──► it sleeps, or shuts down
    joins:   it starts, or wakes ──► it gets the current weights ──► requests are routed to it

    release ──► trainers use the devices ──► reacquire ──► weight sync of all engines ──► serve

Invariants:
    - routing to a leaving engine stops first, so that its requests are never sent back to it;
      a joining engine has the current weights before it gets any request;
    - a detached engine is not replaced, because others use its devices; if it is lost, `release` closes it;
    - an engine that decodes is paused and resumed together with all others, even while it leaves and when it returns;
    - a failed transition affects only its engine, which the fleet replaces when the engine is reattached;
    - transitions of one engine run one after another, and none begins between its `release` and its `serve`;
    - canceling the caller does not cancel a transition, except the start of an engine that is added.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from roll.errors import EngineDiedError, InfraError, UnsupportedError, one_line_error
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.engine_connection import ABORT_RETRY_S, EngineConnection
from roll.rollout.engine_group import EngineGroup
from roll.rollout.fleet import EngineFleet
from roll.rollout.routing import Router
from roll.running import is_cancelled

__all__ = ["EngineTransitions", "RequestHandling"]

logger = logging.getLogger(__name__)

RequestHandling: TypeAlias = Literal["abort", "drain"]
"""How a leaving engine treats its requests: `abort` moves them to other engines, `drain` finishes them first."""
TransitionTask: TypeAlias = asyncio.Task[None]


@dataclass(slots=True)
class _ReleasedEngine:
    """An engine whose devices are used by trainers."""

    was_serving: bool | None = None
    """False if the engine was suspended individually before; `None` until its last transition has ended."""
    is_asleep: bool = False
    """False until the engine sleeps; it stays awake, but paused, if it does not support sleep."""


class EngineTransitions:
    """Adds and removes engines, puts single engines to sleep, and releases the devices of engines to trainers.

    Args:
        engines: The engine group.
        fleet: The fleet of the group.
        router: The router of the fleet, which reports when an engine has no requests.
        prepare: Syncs the current weights to an engine.
        get_pause_mode: Returns the mode in which all engines are suspended; `None` if they are not suspended.
        pause_lock: Lock that is held while all engines pause or resume.
    """

    def __init__(
        self,
        engines: EngineGroup,
        fleet: EngineFleet,
        router: Router,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        get_pause_mode: Callable[[], PauseMode | None],
        pause_lock: asyncio.Lock,
    ) -> None:
        self.between_syncs: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
        """Context in which an engine is put to sleep or closed; it must exclude weight syncs."""
        self._engines = engines
        self._fleet = fleet
        self._router = router
        self._prepare = prepare
        self._get_pause_mode = get_pause_mode
        self._pause_lock = pause_lock
        self._closed = False
        self._steps: dict[str, TransitionTask] = {}
        """Last requested transition of each engine; removed when it has ended."""
        self._running_transitions: dict[TransitionTask, str] = {}
        """Transitions that have begun, with the id of the engine; empty for those of released engines."""
        self._released: dict[str, _ReleasedEngine] = {}
        """Engines between `release` and `serve`, by id."""
        self._served_again = asyncio.Event()
        self._release_lock = asyncio.Lock()
        """Lock that is held while the devices of engines are released or returned."""
        self._unsynced: set[str] = set()
        """Detached engines that have received no weights since they slept."""

    async def add(
        self, engine_id: str, factory: Callable[[], InferenceEngine], *, is_preemptible: bool = False
    ) -> None:
        """Start a new engine and sync the current weights to it; then it serves.

        Args:
            engine_id: Unique id of the engine.
            factory: Builds the engine; called again whenever the engine is replaced.
            is_preemptible: Whether the engine's node may leave at any time (see `EngineConnection.is_preemptible`).

        Raises:
            Exception: The start failed; the group is unchanged.
        """
        step = self._begin(engine_id, lambda: self._add(engine_id, factory, is_preemptible))
        try:
            await _wait_shielded(step)
        except asyncio.CancelledError:
            step.cancel()
            await asyncio.wait({step})
            if not step.cancelled() and step.exception() is None:  # it joined just before the cancellation
                await self.retire(engine_id)
            raise

    def mark_lost(self, engine_id: str, cause: str) -> None:
        """Mark an engine as lost because its node has vanished; its requests start again on other engines.

        The engine is not replaced, and must be removed by `retire`. If the group has no such engine, nothing happens.
        """
        self._fleet.mark_lost(engine_id, cause)

    async def retire(self, engine_id: str, request_handling: RequestHandling = "abort") -> None:
        """Remove an engine permanently, after its requests have left it (see `RequestHandling`)."""
        await _wait_shielded(self._begin(engine_id, lambda: self._retire(engine_id, request_handling)))

    async def sleep(self, engine_id: str, request_handling: RequestHandling = "abort") -> None:
        """Put an engine to sleep until `wake`, after its requests have left it; this frees its device memory.

        Raises:
            UnsupportedError: The engine does not support sleep here; it continues to serve.
        """
        await _wait_shielded(self._begin(engine_id, lambda: self._sleep(engine_id, request_handling)))

    async def wake(self, engine_id: str) -> None:
        """Wake or resume an engine, and sync the current weights to it if it slept; an engine that died is replaced.

        If all engines are paused, it resumes with them.
        """
        await _wait_shielded(self._begin(engine_id, lambda: self._return_to_service(engine_id)))

    async def suspend(self, engine_id: str, mode: PauseMode) -> None:
        """Pause one engine until `wake`; it gets no requests, and keeps its device memory unless it is released."""
        await _wait_shielded(self._begin(engine_id, lambda: self._suspend(engine_id, mode)))

    async def release(self, engine_ids: Collection[str], *, until_batch: bool = False) -> None:
        """Release the devices of engines to trainers until `serve`; their requests continue on other engines, or wait.

        The engines sleep; one that cannot sleep is paused, and keeps its memory. Repeating a call is safe. With
        `until_batch`, `serve` follows only after the next batch, so requests fail if all other engines are given up.
        """
        self._fleet.withheld_ids = frozenset(engine_ids if until_batch else ())
        for engine_id in engine_ids:
            self._released.setdefault(engine_id, _ReleasedEngine())
        await self._run_for_each(engine_ids, self._release)

    async def reacquire(self, engine_ids: Collection[str]) -> None:
        """Allocate the memory of released engines again, so that the next weight sync includes them."""
        await self._run_for_each(engine_ids, self._reacquire)

    async def serve(self, engine_ids: Collection[str], synced: Collection[str]) -> None:
        """Route requests to released engines again, after `reacquire` and a weight sync.

        Args:
            engine_ids: Ids of the engines.
            synced: Ids of all engines that have the current weights; others get the weights first.
        """
        self._fleet.withheld_ids = frozenset()
        await self._run_for_each(engine_ids, lambda engine_id: self._serve(engine_id, engine_id in synced))

    async def close(self) -> None:
        """Cancel all transitions, and reject new ones."""
        self._closed = True
        for step in (steps := {*self._steps.values(), *self._running_transitions}):
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    # ---- steps

    def _begin(self, engine_id: str, transition: Callable[[], Coroutine[Any, Any, None]]) -> TransitionTask:
        """Start a transition of an engine once its previous transition has ended and the engine is not released."""
        if self._closed:
            raise InfraError(
                f"engine '{engine_id}' can no longer be added, removed, paused or put to sleep: the engines were closed"
            )
        before = self._steps.get(engine_id)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            while engine_id in self._released:
                self._served_again.clear()
                await self._served_again.wait()
            # In the event loop iteration in which the check succeeds: `release` waits for these steps.
            self._running_transitions[step] = engine_id
            await transition()

        def end(step: TransitionTask) -> None:
            self._running_transitions.pop(step, None)
            if self._steps.get(engine_id) is step:
                del self._steps[engine_id]

        step = self._steps[engine_id] = asyncio.create_task(run(), name=f"transition of engine {engine_id}")
        step.add_done_callback(end)
        return step

    async def _run_for_each(
        self, engine_ids: Collection[str], transition: Callable[[str], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a transition of each released engine, after the transitions of these engines that are in progress."""

        async def run() -> None:
            async with self._release_lock:
                begun = [step for step, engine_id in self._running_transitions.items() if engine_id in engine_ids]
                if begun:
                    await asyncio.wait(begun)
                for engine_id in set(self._released).difference(self._fleet.engine_ids):  # these were retired
                    del self._released[engine_id]
                await asyncio.gather(*map(transition, filter(self._released.__contains__, engine_ids)))

        step = asyncio.create_task(run(), name="release or return of devices")
        self._running_transitions[step] = ""
        step.add_done_callback(lambda step: self._running_transitions.pop(step, None))
        await _wait_shielded(step)

    async def _release(self, engine_id: str) -> None:
        released = self._released[engine_id]
        if released.was_serving is None:
            released.was_serving = not self._fleet.is_detached(engine_id)
        if released.was_serving:
            await self._fleet.detach(engine_id)
        await self._drain(engine_id, "abort")  # an engine that is suspended may also have requests
        if not released.is_asleep and engine_id not in self._fleet.asleep_ids:
            try:
                await self._sleep_between_syncs(engine_id)
                released.is_asleep = True
            except UnsupportedError:
                async with self._pause_lock:
                    await _pause_unless_lost(connection := self._fleet.get_connection(engine_id), "abort")
                if released.was_serving:  # as a sleeping engine, it gets no weights until `_reacquire`
                    self._engines.exclude(connection.engine)
        await self._fleet.stop_if_lost(engine_id)

    async def _reacquire(self, engine_id: str) -> None:
        released = self._released[engine_id]
        if released.is_asleep:
            await _apply_unless_lost(self._fleet.get_connection(engine_id), self._engines.wake)
            released.is_asleep = False
        elif released.was_serving and (connection := self._fleet.get_connection(engine_id)).lost is None:
            self._engines.include(connection.engine)
            async with self._pause_lock:  # a paused engine may not answer the probe of the weight sync
                await _match_pause(connection, self._get_pause_mode())
                self._fleet.inactive.discard(engine_id)

    async def _serve(self, engine_id: str, synced: bool) -> None:
        was_serving = self._released[engine_id].was_serving
        if not synced:
            self._unsynced.add(engine_id)
        if was_serving:
            await self._sync_and_reattach(self._fleet.get_connection(engine_id))
        del self._released[engine_id]
        self._served_again.set()

    async def _add(self, engine_id: str, factory: Callable[[], InferenceEngine], is_preemptible: bool) -> None:
        self._engines.add(engine_id, factory)
        try:
            await self._fleet.start(engine_id, is_preemptible=is_preemptible)
        except BaseException:
            await self._engines.retire(engine_id)
            raise

    async def _retire(self, engine_id: str, request_handling: RequestHandling) -> None:
        await self._fleet.abandon(engine_id)
        connection = self._fleet.get_connection(engine_id)
        await self._drain(engine_id, request_handling)
        await self._fleet.remove(engine_id)
        self._clear_sleep(engine_id)
        # A broadcast would be repeated for all engines if one of them closed in the middle.
        async with self.between_syncs() if connection.lost is None else nullcontext():
            await self._engines.retire(engine_id)

    async def _sleep(self, engine_id: str, request_handling: RequestHandling) -> None:
        await self._fleet.detach(engine_id)
        await self._drain(engine_id, request_handling)
        self._fleet.asleep_ids.add(engine_id)
        self._unsynced.add(engine_id)
        try:
            await self._sleep_between_syncs(engine_id)
        except UnsupportedError:
            self._clear_sleep(engine_id)
            await self._reattach(self._fleet.get_connection(engine_id))
            raise
        await self._fleet.stop_if_lost(engine_id)

    async def _sleep_between_syncs(self, engine_id: str) -> None:
        """Put an engine without requests to sleep, but not during a weight sync or while all engines pause or resume.

        Raises:
            UnsupportedError: The engine does not support sleep.
        """
        async with self.between_syncs(), self._pause_lock:
            self._fleet.inactive.add(engine_id)
            await _apply_unless_lost(self._fleet.get_connection(engine_id), self._engines.sleep)

    async def _suspend(self, engine_id: str, mode: PauseMode) -> None:
        await self._fleet.detach(engine_id)
        if mode != "keep":  # also ends a request that is just being sent to the engine
            await self._drain(engine_id, mode)
        async with self._pause_lock:
            self._fleet.inactive.add(engine_id)
            await _pause_unless_lost(self._fleet.get_connection(engine_id), mode)

    async def _return_to_service(self, engine_id: str) -> None:
        connection = self._fleet.get_connection(engine_id)
        try:
            if engine_id in self._fleet.asleep_ids:
                await connection.call(self._engines.wake(connection.engine))
                self._fleet.asleep_ids.discard(engine_id)
        except EngineDiedError as error:
            connection.mark_lost(error)
        await self._sync_and_reattach(connection)

    async def _sync_and_reattach(self, connection: EngineConnection) -> None:
        """Sync the current weights to a detached engine if it needs them; then it serves."""
        engine_id = connection.engine.engine_id
        if engine_id in self._unsynced and connection.lost is None:
            try:
                await self._prepare(connection.engine)
            except EngineDiedError as error:
                connection.mark_lost(error)
        self._clear_sleep(engine_id)
        await self._reattach(connection)

    def _clear_sleep(self, engine_id: str) -> None:
        self._fleet.asleep_ids.discard(engine_id)
        self._unsynced.discard(engine_id)

    async def _reattach(self, connection: EngineConnection) -> None:
        """Pause or resume an engine so that it matches all other engines; then it serves."""
        async with self._pause_lock:
            await _match_pause(connection, self._get_pause_mode())
            self._fleet.inactive.discard(connection.engine.engine_id)
            self._fleet.reattach(connection.engine.engine_id)

    async def _drain(self, engine_id: str, request_handling: RequestHandling) -> None:
        connection = self._fleet.get_connection(engine_id)
        await _wait_until_idle(connection, self._router.get_idle_future(engine_id), request_handling)


async def _wait_until_idle(
    connection: EngineConnection, idle: asyncio.Future[None], request_handling: RequestHandling
) -> None:
    """Wait until a detached engine has no requests (`idle`); if `request_handling` is `abort`, abort them."""
    while not idle.done():
        if request_handling == "abort":  # repeated, because an abort may reach the engine before the request
            with suppress(EngineDiedError):
                await connection.abort_all()
        await asyncio.wait({idle}, timeout=ABORT_RETRY_S)


async def _match_pause(connection: EngineConnection, mode: PauseMode | None) -> None:
    """Pause an engine in the mode of all other engines, or resume it if they are not paused (`None`)."""
    with suppress(EngineDiedError):
        if connection.is_paused != (mode is not None):
            await (connection.resume() if mode is None else connection.pause(mode))


async def _pause_unless_lost(connection: EngineConnection, mode: PauseMode) -> None:
    """Pause the engine behind a connection, and ignore the error if the engine is lost."""
    with suppress(EngineDiedError):
        await connection.pause(mode)


async def _apply_unless_lost(
    connection: EngineConnection, call: Callable[[InferenceEngine], Coroutine[Any, Any, None]]
) -> None:
    """Call a method of the engine behind a connection, and ignore the error if the engine is lost."""
    with suppress(EngineDiedError):
        await connection.call(call(connection.engine))


async def _wait_shielded(step: TransitionTask) -> None:
    """Wait for a transition, which continues if the caller is canceled."""
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        if step.cancelled() and not is_cancelled():
            raise InfraError(f"{step.get_name()} was canceled, because the engines were closed") from None
        step.add_done_callback(_log_failure)
        raise


def _log_failure(step: TransitionTask) -> None:
    if not step.cancelled() and (error := step.exception()) is not None:
        logger.warning("%s failed after its caller was canceled: %s", step.get_name(), one_line_error(error))
