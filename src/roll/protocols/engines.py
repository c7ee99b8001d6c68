"""The controller's interface to inference engines."""

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

__all__ = ["InferenceEngine", "PauseMode", "SupportsAdapterScoring", "SupportsPrefetch", "SupportsReadback"]

PauseMode: TypeAlias = Literal["keep", "abort", "drain"]


@runtime_checkable
class InferenceEngine(Protocol):
    """Generates token IDs from token IDs, without a tokenizer. All calls come from one asyncio event loop."""

    engine_id: str

    async def start(self) -> None:
        """Load the model. Other methods may be called only after this has returned."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request until it finishes; an aborted request returns the tokens so far, with
        `finish_reason="abort"`.

        Raises:
            EngineDiedError: The engine died; the request may be sent to another engine.
        """
        ...

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        """Return the log-prob of each token given the tokens before it, at temperature 1, shape [L] per sequence.

        The first entry is 0.

        Args:
            sequences: Tokens of each sequence, [L].
            media: Media spans of each sequence; empty if no sequence has media.
        """
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests immediately; unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Pause decoding: `keep` freezes running requests, `abort` ends them, `drain` lets them finish."""
        ...

    async def resume(self) -> None:
        """Resume decoding; frozen requests continue where they stopped."""
        ...

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Fetch and apply new weights, and return checksums of the received weights.

        Tokens generated afterwards have the new policy version.

        Raises:
            WeightSyncError: A tensor is missing, unknown, or has the wrong shape; the message names it.
        """
        ...

    async def sleep(self) -> None:
        """Free the device memory, including the weights.

        Raises:
            UnsupportedError: The engine does not support sleep here.
        """
        ...

    async def wake(self) -> None:
        """Allocate the device memory again; weights must be synced before the next request."""
        ...

    def load(self) -> EngineLoad:
        """Return the current load of the engine."""
        ...

    async def close(self) -> None:
        """Shut down the engine and every process it started. Calling it twice is safe."""
        ...


class SupportsAdapterScoring(Protocol):
    """An optional extension of `InferenceEngine`: an engine that computes log-probs with one of several adapters."""

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), *, adapter: str | None = None
    ) -> list[FloatArray]:
        """Return log-probs as `InferenceEngine.logprobs` does, with an adapter; `None` for the policy itself.

        Raises:
            DataError: The engine has no adapter of this name.
        """
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """An optional extension of `InferenceEngine`: an engine that can fetch new weights while it generates."""

    async def prefetch_weights(self, update: WeightUpdate) -> None:
        """Fetch the weights of an update to this host, so that a later `update_weights` only applies them. Requests
        continue with the old weights in the meantime. `roll.weights.store.WeightPrefetcher` implements this.

        Raises:
            WeightSyncError: The weights cannot be fetched; the message names the file and the store.
        """
        ...


@runtime_checkable
class SupportsReadback(Protocol):
    """An optional extension of `InferenceEngine`: an engine that can read its weights back."""

    async def applied_checksums(self) -> Mapping[str, int] | None:
        """Return checksums of the engine's current weights.

        Returns:
            `roll.weights.compute_checksum` of each stored tensor in the manifest's dtype, by tensor name; tensors that
            cannot be read back (repacked, quantized, fused) are left out. `None` if no tensor can be read back, or if
            reading takes longer than about 0.2 s per GB, since this is called after every sync.
        """
        ...
