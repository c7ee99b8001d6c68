"""Advantages weighted by attention: asks the trainer for its maps' statistics, where the algorithm wants them."""

from __future__ import annotations

from roll.algorithms import credit
from roll.pipelines.parts import Parts
from roll.types import FloatArray, TrainingBatch

__all__ = ["credit_factors"]


async def credit_factors(parts: Parts, batch: TrainingBatch) -> list[FloatArray]:
    """[n][L] factors on the advantages of a batch; nothing where the algorithm does not weigh them."""
    settings = parts.config.algorithm.credit
    if settings.type == "none":
        return []
    with parts.spans.phase("attention"):
        horizon = (settings.horizon_start, settings.horizon_end)
        statistics = await parts.trainer.attention_statistics(batch, settings.window, horizon)
    return [
        credit.credit_factors(
            found,
            sample.loss_mask,
            form=settings.type,
            amplification=settings.amplification,
            share=settings.share,
            introduction=settings.introduction,
            back_share=settings.back_share,
            calm_quantile=settings.calm_quantile,
            jump_quantile=settings.jump_quantile,
        )
        for found, sample in zip(statistics, batch.samples, strict=True)
    ]
