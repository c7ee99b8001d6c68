"""The engines of a server. Each has its own cache of snapshots, and is restarted when it dies or hangs.

    request ─► the engine with the fewest sequences ─► its snapshots (`snapshot_cache`) ─► tokens
                       └─ died: restarted without snapshots; requests load their snapshots again and continue

A new engine has the base model's weights, and receives a snapshot when a request needs it. Requests therefore continue
with the same weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roll.errors import EngineDiedError, iterate_leaf_errors, one_line_error
from roll.protocols import InferenceEngine
from roll.rollout.engine_group import EngineGroup
from roll.serving.engine_calls import EngineCalls
from roll.serving.failures import RequestFailure
from roll.serving.snapshot_cache import SnapshotCache, SnapshotId

__all__ = ["ServedEngine", "ServedEngines", "find_engine_death"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    engine: InferenceEngine
    calls: EngineCalls
    cache: SnapshotCache


class ServedEngine:
    """An engine that is restarted after it dies.

    Args:
        group: The group of the engine.
        engine: The started engine.
        open_cache: A function that creates the snapshot cache of an engine.
    """

    def __init__(
        self, group: EngineGroup, engine: InferenceEngine, open_cache: Callable[[EngineCalls], SnapshotCache]
    ) -> None:
        self.engine_id = engine.engine_id
        self.num_sequences = 0
        """The number of sequences that are being sampled."""
        self.num_restarts = 0
        self._group = group
        self._open_cache = open_cache
        self._running = self._connect(engine)
        self._restart: asyncio.Task[None] | None = None
        """The running restart, if the engine has died."""

    @property
    def is_ready(self) -> bool:
        """True unless the engine is being restarted."""
        return self._restart is None

    def _connect(self, engine: InferenceEngine) -> _Running:
        calls = EngineCalls(engine, lambda death: self._report(running, death))
        running = _Running(engine, calls, self._open_cache(calls))
        return running

    def has(self, snapshot: SnapshotId | None) -> bool:
        """Return whether the engine has a snapshot; it always has the base model."""
        return snapshot is None or snapshot in self._running.cache

    async def start(self) -> None:
        """Prepare the engine for requests."""
        await self._running.cache.start()

    @asynccontextmanager
    async def use(
        self, snapshot: SnapshotId | None, num_sequences: int
    ) -> AsyncIterator[tuple[EngineCalls, str | None]]:
        """Keep a snapshot in the engine during the `with` block.

        Args:
            snapshot: The snapshot; `None` for the base model.
            num_sequences: The number of sequences that the block samples.

        Yields:
            The calls to the engine, and the name of the snapshot in it.

        Raises:
            EngineDiedError: The engine died, and is being started again. It may be in an exception group.
            RequestFailure: The engine died and cannot be started again.
        """
        self.num_sequences += num_sequences
        try:
            if self._restart is not None:
                await asyncio.shield(self._restart)  # several requests wait for it
            running = self._running
            try:
                async with running.cache.use(snapshot) as adapter:
                    yield running.calls, adapter
            except Exception as error:
                if (death := find_engine_death(error)) is not None:  # known, unless the last restart has failed
                    self._report(running, death)
                raise
        finally:
            self.num_sequences -= num_sequences

    def _report(self, running: _Running, death: EngineDiedError) -> None:
        """Restart the engine, unless it was already restarted after this death."""
        if running is self._running and self._restart is None:
            logger.error("%s. Restarting it.", death)
            self._restart = asyncio.create_task(self._restart_engine(running), name=f"restart {self.engine_id}")
            self._restart.add_done_callback(lambda task: task.cancelled() or task.exception())  # it was logged

    async def _restart_engine(self, dead: _Running) -> None:
        try:
            engine = await self._group.replace(self.engine_id)  # closes the dead one, so its loads of snapshots fail
            await dead.cache.abandon()
            fresh = self._connect(engine)
            await fresh.cache.start()
        except Exception as error:
            logger.exception("the engine '%s' could not be restarted", self.engine_id)
            raise RequestFailure(
                f"the engine died and could not be restarted: {one_line_error(error)}. Send the request again later.",
                "server",
            ) from error
        else:
            self._running = fresh
            self.num_restarts += 1
            logger.warning("the engine '%s' was restarted", self.engine_id)
        finally:
            self._restart = None

    async def close(self) -> None:
        """Stop a restart, and free the memory of snapshots. The group closes the engine."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        self._running.calls.close()
        await self._running.cache.close()


class ServedEngines:
    """The engines of a server.

    Args:
        engines: The engines; at least one.
    """

    def __init__(self, engines: Sequence[ServedEngine]) -> None:
        self.members = tuple(engines)

    def choose(self, snapshot: SnapshotId | None) -> ServedEngine:
        """Return the engine for a request: prefer running engines, then few sequences, then those with the snapshot."""

        def rank(engine: ServedEngine) -> tuple[bool, int, bool]:
            return not engine.is_ready, engine.num_sequences, not engine.has(snapshot)

        return min(self.members, key=rank)

    async def start(self) -> None:
        """Prepare all engines for requests."""
        for each in self.members:
            await each.start()

    async def close(self) -> None:
        """Stop all restarts and close the snapshot caches."""
        for each in self.members:
            await each.close()


def find_engine_death(error: BaseException) -> EngineDiedError | None:
    """Return the `EngineDiedError` in an error or exception group; `None` if there is none."""
    return next((each for each in iterate_leaf_errors(error) if isinstance(each, EngineDiedError)), None)
