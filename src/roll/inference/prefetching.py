"""Fetching of new weights while an engine generates, for engines of the weight transport `store`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.types import WeightUpdate

if TYPE_CHECKING:
    from roll.weights.store import WeightPrefetcher

__all__ = ["PrefetchMixin"]


class PrefetchMixin:
    """Implements `SupportsPrefetch`: the engine's process fetches the weights, and its workers read this copy."""

    _prefetcher: WeightPrefetcher | None = None

    async def prefetch_weights(self, update: WeightUpdate) -> None:
        """Fetch new weights while requests run; see `SupportsPrefetch`."""
        # Not in vLLM's workers: EngineCore does not decode while it runs a call of its workers.
        from roll.weights.store import WeightPrefetcher

        self._prefetcher = self._prefetcher or WeightPrefetcher()
        await self._prefetcher.prefetch(update)

    def delete_local_weights(self) -> None:
        """Delete the local copy of the weights, unless another engine uses it."""
        if self._prefetcher is not None:
            self._prefetcher.close()
