"""A wrapper for a user's own engine, whose error messages name the engine and the line that failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from roll.errors import ConfigError, EngineError, RollError, one_line_error, raised_at
from roll.protocols import InferenceEngine, PauseMode, SupportsReadback
from roll.types import (
    EngineLoad,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    SequenceMedia,
    WeightReceipt,
    WeightUpdate,
)

__all__ = ["OwnEngine"]

_METHODS = [name for name, value in vars(InferenceEngine).items() if not name.startswith("_") and callable(value)]


class OwnEngine:
    """Forwards every call to the user's engine; implements `InferenceEngine` and `SupportsReadback`."""

    def __init__(self, kind: str, engine_id: str, build: Callable[[], Any]) -> None:
        """Build the user's engine.

        Args:
            kind: The engine's name or import path, for messages.
            engine_id: The id from its spec.
            build: A function that builds the engine.

        Raises:
            ConfigError: `build` fails, or its result lacks a method.
        """
        self.engine_id = engine_id
        self._kind = kind
        try:
            self._engine = build()
        except RollError:
            raise
        except Exception as error:
            place, what = raised_at(error), one_line_error(error)
            raise ConfigError(f"engine '{kind}' cannot be built with an EngineSpec ({place}): {what}") from error
        missing = [name for name in _METHODS if not callable(getattr(self._engine, name, None))]
        if missing:
            raise ConfigError(
                f"engine '{kind}' lacks {', '.join(missing)}: give it the methods of roll.protocols.InferenceEngine."
            )

    async def start(self) -> None:
        """See `InferenceEngine`, also for all methods below."""
        await self._call("start")

    async def generate(self, request: GenerationRequest) -> Generation:
        made = self._check_result("generate", await self._call("generate", request), Generation)
        arrays = (made.token_ids, made.logprobs, made.policy_versions)
        shapes = [getattr(array, "shape", None) for array in arrays]
        if shapes != [(len(made.token_ids),)] * 3:
            raise self._error(
                "generate must return token_ids, logprobs and policy_versions as arrays of one length, and returned "
                f"shapes {shapes}"
            )
        return made

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        found = await self._call("logprobs", sequences, media)
        asked = [len(sequence) for sequence in sequences]
        if not isinstance(found, list) or [getattr(array, "shape", None) for array in found] != [(n,) for n in asked]:
            raise self._error(f"logprobs must return a list of arrays, of the sequences' lengths {asked}")
        return found

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._call("abort", request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        return self._check_result("update_weights", await self._call("update_weights", update), WeightReceipt)

    async def applied_checksums(self) -> Mapping[str, int] | None:
        return await self._call("applied_checksums") if isinstance(self._engine, SupportsReadback) else None

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    def load(self) -> EngineLoad:
        return self._check_result("load", self._engine.load(), EngineLoad)

    async def close(self) -> None:
        await self._call("close")

    async def _call(self, name: str, *arguments: Any) -> Any:
        """Await a method of the user's engine.

        Raises:
            EngineError: the method raises an error that is not one of ROLL's, or is not a coroutine.
        """
        try:
            answer = getattr(self._engine, name)(*arguments)
            if not hasattr(answer, "__await__"):
                raise self._error(f"{name} is no coroutine: write `async def {name}`")
            return await answer
        except RollError:
            raise
        except Exception as error:
            raise self._error(f"{name} failed at {raised_at(error)}: {one_line_error(error)}") from error

    def _check_result(self, name: str, answer: Any, kind: type[Any]) -> Any:
        if not isinstance(answer, kind):
            raise self._error(f"{name} returned {type(answer).__name__}, not {kind.__name__}")
        return answer

    def _error(self, what: str) -> EngineError:
        return EngineError(f"engine '{self._kind}': {what}.")
