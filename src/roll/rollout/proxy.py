"""LLMProxy: one door to all inference engines.

    scheduler ──► generate(request) ──► engine with the fewest requests ──► Generation
                        ▲                        │ EngineDiedError
                        └──── issue again ◄── replace the engine, sync its weights

Invariants:
    - every request gets exactly one `Generation` or one error;
    - a request whose engine died is issued again, with the same seed, on a live engine; a dead engine is replaced once,
      however many requests notice its death, and takes requests only after its weights were synced;
    - the choice of an engine depends on the order of calls alone, never on time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from roll.errors import EngineDiedError
from roll.protocols import EngineGroup, InferenceEngine
from roll.types import Generation, GenerationRequest

__all__ = ["LLMProxy"]

logger = logging.getLogger(__name__)


class LLMProxy:
    """Routes requests, and replaces engines that die.

    Args:
        engines: the engines of the run.
        prepare: brings a fresh engine to the current weights before it serves.
        max_attempts: how often one request is issued before its engine's death is passed on.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        *,
        max_attempts: int = 3,
    ) -> None:
        self._engines = engines
        self._prepare = prepare
        self._max_attempts = max_attempts
        self._in_flight: Counter[str] = Counter()
        self._replacements: dict[str, asyncio.Task[None]] = {}
        self.num_replaced = 0
        self.num_reissued = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run a request on the least busy engine.

        Raises:
            EngineDiedError: engines died under it `max_attempts` times.
        """
        for attempt in range(1, self._max_attempts + 1):
            engine = await self._least_busy()
            self._in_flight[engine.engine_id] += 1
            try:
                return await engine.generate(request)
            except EngineDiedError as error:
                logger.warning("request %s, attempt %d: %s", request.request_id, attempt, error)
                self.replace(engine)
                if attempt == self._max_attempts:
                    raise
                self.num_reissued += 1
            finally:
                self._in_flight[engine.engine_id] -= 1
        raise AssertionError("unreachable: the last attempt returns or raises")

    def replace(self, dead: InferenceEngine) -> None:
        """Start replacing an engine, unless that is under way or done."""
        engine_id = dead.engine_id
        if engine_id in self._replacements or not any(engine is dead for engine in self._engines.engines):
            return
        self._replacements[engine_id] = asyncio.create_task(self._replace(engine_id), name=f"replace-{engine_id}")

    async def _replace(self, engine_id: str) -> None:
        fresh = await self._engines.replace(engine_id)
        await self._prepare(fresh)
        self.num_replaced += 1

    async def _least_busy(self) -> InferenceEngine:
        """Wait until an engine serves, then return the one with the fewest requests (the first of equals)."""
        while True:
            for engine_id, task in list(self._replacements.items()):
                if task.done():
                    del self._replacements[engine_id]
                    task.result()  # an engine that cannot be replaced ends the run
            serving = [e for e in self._engines.engines if e.engine_id not in self._replacements]
            if serving:
                return min(serving, key=lambda engine: self._in_flight[engine.engine_id])
            await asyncio.wait(self._replacements.values(), return_when=asyncio.FIRST_COMPLETED)

    async def settle(self) -> None:
        """Wait for replacements under way, so that the next weight sync reaches every engine."""
        while self._replacements:
            engine_id, task = next(iter(self._replacements.items()))
            await task
            del self._replacements[engine_id]

    async def restore(self, engine_ids: Collection[str]) -> None:
        """Replace engines that others found dead, and wait until they serve."""
        for engine in self._engines.engines:
            if engine.engine_id in engine_ids:
                self.replace(engine)
        await self.settle()

    async def abort_all(self, request_ids: list[str]) -> None:
        """End requests on every engine; a dead engine has none."""
        for engine in self._engines.engines:
            if engine.engine_id not in self._replacements:
                try:
                    await engine.abort(request_ids)
                except EngineDiedError:
                    self.replace(engine)
