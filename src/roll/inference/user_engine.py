"""A wrapper for user-defined engines; its error messages name the engine and the line that failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from roll.errors import ConfigError, EngineError, RollError, find_raise_location, one_line_error
from roll.protocols import InferenceEngine, PauseMode, SupportsPrefetch, SupportsReadback
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

__all__ = ["UserEngine"]

_ENGINE_METHODS = [
    name for name, value in vars(InferenceEngine).items() if not name.startswith("_") and callable(value)
]


class UserEngine:
    """Forwards every call to the user-defined engine, and checks the results.

    Also implements `SupportsPrefetch` and `SupportsReadback`.
    """

    def __init__(self, kind: str, engine_id: str, build: Callable[[], Any]) -> None:
        """Build the user's engine.

        Args:
            kind: The engine's name or import path, for messages.
            engine_id: The id of the engine.
            build: A function that builds the engine.

        Raises:
            ConfigError: `build` fails, or the engine lacks a method.
        """
        self.engine_id = engine_id
        self._kind = kind
        try:
            self._engine = build()
        except RollError:
            raise
        except Exception as error:
            place, cause = find_raise_location(error), one_line_error(error)
            raise ConfigError(f"engine '{kind}' cannot be created with an EngineSpec ({place}): {cause}") from error
        missing = [name for name in _ENGINE_METHODS if not callable(getattr(self._engine, name, None))]
        if missing:
            raise ConfigError(
                f"engine '{kind}' does not implement the methods {', '.join(missing)} of "
                "roll.protocols.InferenceEngine."
            )

    async def start(self) -> None:
        """See `InferenceEngine`, which also describes all methods below."""
        await self._call("start")

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = self._check_result("generate", await self._call("generate", request), Generation)
        arrays = (generation.token_ids, generation.logprobs, generation.policy_versions)
        # Checked here, because a wrong length would otherwise cause an error much later, in the trainer's batch.
        shapes = [getattr(array, "shape", None) for array in arrays]
        if shapes != [(len(generation.token_ids),)] * 3:
            raise self._build_error(
                "generate must return token_ids, logprobs and policy_versions as arrays of equal length, got shapes "
                f"{shapes}"
            )
        return generation

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        logprobs = await self._call("logprobs", sequences, media)
        lengths = [len(sequence) for sequence in sequences]
        shapes = [getattr(array, "shape", None) for array in logprobs] if isinstance(logprobs, list) else None
        if shapes != [(length,) for length in lengths]:
            returned = type(logprobs).__name__ if shapes is None else f"arrays of shapes {shapes}"
            raise self._build_error(
                f"logprobs must return a list of arrays with the sequences' lengths {lengths}, got {returned}"
            )
        return logprobs

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._call("abort", request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        return self._check_result("update_weights", await self._call("update_weights", update), WeightReceipt)

    async def prefetch_weights(self, update: WeightUpdate) -> None:
        if isinstance(self._engine, SupportsPrefetch):
            await self._call("prefetch_weights", update)

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
        """Call a method of the user's engine and await its result.

        Raises:
            EngineError: the method is not a coroutine function, or raises an error that ROLL does not define.
        """
        try:
            answer = getattr(self._engine, name)(*arguments)
            if not hasattr(answer, "__await__"):
                raise self._build_error(f"{name} must be a coroutine function: write `async def {name}`")
            return await answer
        except RollError:
            raise
        except Exception as error:
            raise self._build_error(
                f"{name} failed at {find_raise_location(error)}: {one_line_error(error)}"
            ) from error

    def _check_result(self, name: str, answer: Any, kind: type[Any]) -> Any:
        if not isinstance(answer, kind):
            raise self._build_error(f"{name} must return {kind.__name__}, got {type(answer).__name__}")
        return answer

    def _build_error(self, message: str) -> EngineError:
        return EngineError(f"engine '{self._kind}': {message}.")
