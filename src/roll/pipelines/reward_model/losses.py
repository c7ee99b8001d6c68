"""Losses of a reward model."""

from __future__ import annotations

from roll.algorithms.losses import BradleyTerryLoss, RegressionLoss
from roll.config.pipelines.reward_model import RewardModelSection
from roll.protocols import LossFn

__all__ = ["BRADLEY_TERRY", "REGRESSION", "build_loss"]

BRADLEY_TERRY, REGRESSION = BradleyTerryLoss(), RegressionLoss()


def build_loss(section: RewardModelSection) -> LossFn:
    """Build the configured loss of a reward model."""
    return REGRESSION if section.loss == "regression" else BradleyTerryLoss(centering=section.centering)
