"""The configuration of training a reward model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.supervised import SupervisedConfig

__all__ = ["RewardModelConfig", "RewardModelSection"]


class RewardModelSection(Section):
    """Loss of the reward model."""

    loss: Literal["bradley_terry", "regression"] = option(
        "bradley_terry",
        "`bradley_terry`: the chosen answer of a pair must score higher than the rejected one, by the row's margin if "
        "it has one. `regression`: the score of each answer must equal the row's score.",
    )
    centering: float = option(
        0.0,
        "`bradley_terry`: weight of the term that keeps scores around 0; 0.01 is usual (arXiv 2312.09244).",
        ge=0,
    )


class RewardModelConfig(SupervisedConfig):
    """Training of a reward model, which scores a whole conversation, for `reward: {type: reward_model}`."""

    pipeline: Literal["reward_model"] = option("reward_model", "Name of the pipeline.")
    reward_model: RewardModelSection = option(RewardModelSection(), "Loss of the reward model.")

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.reward_model.loss == "regression" and self.reward_model.centering:
            raise ValueError(
                "reward_model.centering has no effect with `loss: regression`: remove it, or set loss to bradley_terry"
            )
        if self.evaluation.answers is not None:
            raise ValueError("evaluation.answers is not supported with the pipeline reward_model: remove it")
        return self
