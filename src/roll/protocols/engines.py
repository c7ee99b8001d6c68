"""What the controller asks of inference engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

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

__all__ = ["InferenceEngine", "PauseMode", "SupportsReadback"]

PauseMode: TypeAlias = Literal["keep", "abort", "drain"]


@runtime_checkable
class InferenceEngine(Protocol):
    """Tokens in, tokens out; never tokenises. One asyncio loop drives it."""

    engine_id: str

    async def start(self) -> None:
        """Load the model. Other methods may be called only after this has returned."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request to its end; an aborted one returns its partial tokens, `finish_reason="abort"`.

        Raises:
            EngineDiedError: the engine is gone; the request may be issued again elsewhere.
        """
        ...

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        """Per sequence [L]: log-prob of each token given those before it, temperature 1; entry 0 is 0.

        Args:
            sequences: [L] tokens of each.
            media: where media stand in each; empty where none has any.
        """
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests now; unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding: `keep` freezes running requests, `abort` ends them, `drain` lets them finish."""
        ...

    async def resume(self) -> None:
        """Decode again; kept requests continue where they were."""
        ...

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Fetch and apply new weights, and confirm what arrived; later tokens carry the new policy version.

        Raises:
            WeightSyncError: a tensor is missing, unknown, or of another shape; names it.
        """
        ...

    async def sleep(self) -> None:
        """Give the device's memory back, that of the weights too.

        Raises:
            UnsupportedError: the engine cannot do it here.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again; weights must be synced before the next request."""
        ...

    def load(self) -> EngineLoad:
        """How busy it is right now."""
        ...

    async def close(self) -> None:
        """End it and every process it started; may be called twice."""
        ...


@runtime_checkable
class SupportsReadback(Protocol):
    """An engine that can say which bytes it computes with. Optional: `isinstance(engine, SupportsReadback)`."""

    async def applied_checksums(self) -> Mapping[str, int] | None:
        """Read the weights back from where the engine computes with them.

        Returns:
            By tensor name, `roll.weights.tensor_checksum` of the tensor as it is held, in the manifest's dtype; names
            that cannot be read back (repacked, quantised, fused) are left out. `None`: nothing can be, or it would
            take longer than about 0.2 s per GB, since it is asked after every sync.
        """
        ...
