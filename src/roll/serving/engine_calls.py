"""The calls of a server to one engine. Each call returns or raises an error, even if the engine hangs.

An engine that makes no step for some minutes counts as dead: see `roll.rollout.hang_detector`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from roll.errors import EngineDiedError
from roll.protocols import InferenceEngine, SupportsAdapterScoring
from roll.rollout.engine_connection import EngineConnection
from roll.types import FloatArray, Generation, GenerationRequest, IntArray, WeightReceipt, WeightUpdate

__all__ = ["EngineCalls"]

T = TypeVar("T")


class EngineCalls:
    """The calls to one engine.

    Args:
        engine: The started engine.
        on_death: A function that is called once with the error, when the engine has died or hangs.
    """

    def __init__(self, engine: InferenceEngine, on_death: Callable[[EngineDiedError], None]) -> None:
        self._engine = engine
        self._on_death = on_death
        self._connection = EngineConnection(engine, self._report)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        return await self._connection.generate(request, lambda: None)

    async def score(self, sequence: IntArray, adapter: str | None) -> FloatArray:
        """Return the log-probs of a sequence; see `SupportsAdapterScoring.logprobs`."""
        work = cast(SupportsAdapterScoring, self._engine).logprobs([sequence], adapter=adapter)
        (found,) = await self._call(work)
        return found

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `InferenceEngine.update_weights`."""
        return await self._call(self._engine.update_weights(update))

    def close(self) -> None:
        """Stop watching the engine."""
        self._connection.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        # An update that fails leaves the other adapters as they were.
        return await self._connection.call(work, changes_state=False)

    def _report(self, connection: EngineConnection) -> None:
        assert connection.lost is not None
        self._on_death(connection.lost)
