"""The engines of a role, wherever they run: started together, and made again one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from roll.protocols import InferenceEngine

__all__ = ["StartedEngines"]


class StartedEngines:
    """Implements `EngineGroup`.

    Args:
        makers: each makes an engine that is not started yet; by engine id.
    """

    def __init__(self, makers: Mapping[str, Callable[[], InferenceEngine]]) -> None:
        self._makers = dict(makers)
        self._engines = {engine_id: make() for engine_id, make in makers.items()}

    @classmethod
    async def start(
        cls, makers: Mapping[str, Callable[[], InferenceEngine]], *, at_once: bool = False
    ) -> StartedEngines:
        """Start every engine; one after the other, unless `at_once`."""
        group = cls(makers)
        try:
            if at_once:
                await asyncio.gather(*(engine.start() for engine in group.engines))
            else:
                for engine in group.engines:
                    await engine.start()
        except BaseException:
            await group.close()
            raise
        return group

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """In the order in which they were given."""
        return tuple(self._engines.values())

    async def replace(self, engine_id: str) -> InferenceEngine:
        """See `EngineGroup.replace`."""
        await self._engines[engine_id].close()
        fresh = self._makers[engine_id]()
        try:
            await fresh.start()
        except BaseException:
            await fresh.close()
            raise
        self._engines[engine_id] = fresh
        return fresh

    async def close(self) -> None:
        """Close every engine, then raise the first error there was."""
        results = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
