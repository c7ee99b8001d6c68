"""Checks of reward-model training before it starts, for `roll check`."""

from __future__ import annotations

from roll.config.pipelines.reward_model import RewardModelConfig
from roll.pipelines.supervised.check import inspect as inspect_examples
from roll.preflight import Report

__all__ = ["inspect"]


def inspect(config: RewardModelConfig) -> Report:
    """Check a reward-model run before it starts, and return the report."""
    loss = config.reward_model.loss
    return inspect_examples(
        config,
        kind="scored" if loss == "regression" else "pair",
        method=loss,
        loss=f"roll.pipelines.reward_model.losses:{loss.upper()}",
        role="reward_model",
    )
