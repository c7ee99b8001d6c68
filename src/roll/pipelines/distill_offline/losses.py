"""Losses of offline distillation."""

from __future__ import annotations

from roll.algorithms.losses import DistillationLoss, LikelihoodLoss, SummedLoss, TopKDistillationLoss
from roll.config.distillation import OfflineDistillationConfig
from roll.protocols import LossFn

__all__ = ["DISTRIBUTION_BENCHMARK_LOSS", "TOP_K_BENCHMARK_LOSS", "build_offline_loss"]

DISTRIBUTION_BENCHMARK_LOSS = DistillationLoss()
"""Loss with which a step is timed for any divergence over whole distributions."""
TOP_K_BENCHMARK_LOSS = LikelihoodLoss()
"""Loss that stands in for top-k distillation when a step is timed, since samples have no teacher columns then."""


def build_offline_loss(config: OfflineDistillationConfig) -> LossFn:
    """Return the loss weight x D(teacher, student) + (1 - weight) x NLL, with the configured `weight`.

    With the divergence `forward` it is the loss of arXiv 1503.02531.
    """
    divergence: LossFn = (
        TopKDistillationLoss(aggregation=config.aggregation)
        if config.mode == "precomputed"
        else DistillationLoss(divergence=config.divergence_spec, aggregation=config.aggregation)
    )
    if config.weight == 1.0:
        return divergence
    likelihood = LikelihoodLoss(aggregation=config.aggregation)
    return SummedLoss(parts=((config.weight, divergence), (1.0 - config.weight, likelihood)))
