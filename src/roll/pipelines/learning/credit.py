"""Advantages weighted by attention: asks the trainer for its maps' statistics, where the algorithm wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.types import FloatArray, TrainingBatch

if TYPE_CHECKING:
    from roll.pipelines.parts import Parts

__all__ = ["credit_factors"]


async def credit_factors(parts: Parts, batch: TrainingBatch) -> list[FloatArray]:
    """[n][L] factors, or nothing."""
    if parts.config.algorithm.credit.type == "none":
        return []
    raise NotImplementedError
