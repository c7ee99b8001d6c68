"""The inference engines of a role: started together, and replaced one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from roll.errors import ConfigError
from roll.protocols import InferenceEngine
from roll.rollout.engine_group import EngineGroup

__all__ = ["ManagedEngineGroup"]


class ManagedEngineGroup(EngineGroup):
    """An `EngineGroup` that creates, starts and replaces its engines.

    Args:
        factories: For each engine ID, a function that creates the engine without starting it.
    """

    def __init__(self, factories: Mapping[str, Callable[[], InferenceEngine]]) -> None:
        self._factories = dict(factories)
        self._engines = {engine_id: factory() for engine_id, factory in factories.items()}

    @classmethod
    async def start(
        cls,
        factories: Mapping[str, Callable[[], InferenceEngine]],
        *,
        concurrently: bool = False,
        asleep: Sequence[Collection[str]] = (),
    ) -> ManagedEngineGroup:
        """Create and start all engines, concurrently or one after the other.

        Args:
            factories: See `ManagedEngineGroup`.
            concurrently: Whether engines start concurrently.
            asleep: See `Cluster.start_engines`.

        Raises:
            UnsupportedError: An engine in `asleep` does not support sleep.
        """
        group = cls(factories)
        try:
            for names in asleep:
                await group._start_members(names, concurrently=concurrently)
                await asyncio.gather(*(group.sleep(group._engines[name]) for name in names))
            others = set(factories).difference(*asleep)
            await group._start_members([name for name in factories if name in others], concurrently=concurrently)
        except BaseException:
            await group.close()
            raise
        return group

    async def _start_members(self, engine_ids: Collection[str], *, concurrently: bool) -> None:
        if concurrently:
            await asyncio.gather(*(self._engines[engine_id].start() for engine_id in engine_ids))
            return
        for engine_id in engine_ids:
            await self._engines[engine_id].start()

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """See `EngineGroup.engines`."""
        return tuple(self._engines.values())

    def add(self, engine_id: str, factory: Callable[[], InferenceEngine]) -> None:
        """See `EngineGroup.add`."""
        if engine_id in self._factories:
            raise ConfigError(f"engine id '{engine_id}' is already in use: choose another id for the new engine.")
        self._factories[engine_id] = factory

    async def retire(self, engine_id: str) -> None:
        """See `EngineGroup.retire`."""
        self._factories.pop(engine_id, None)
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            await engine.close()

    async def replace(self, engine_id: str) -> InferenceEngine:
        """See `EngineGroup.replace`."""
        if engine_id in self._engines:  # closed first, because two engines would not fit into the device's memory
            await self._engines[engine_id].close()
        fresh = self._factories[engine_id]()
        try:
            await fresh.start()
        except BaseException:
            await fresh.close()
            raise
        self._engines[engine_id] = fresh
        return fresh

    async def stop(self, engine_id: str) -> None:
        """See `EngineGroup.stop`."""
        await self._engines[engine_id].close()

    async def close(self) -> None:
        """Close every engine, then raise the first error, if any."""
        results = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
