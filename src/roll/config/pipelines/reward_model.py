"""The configuration of training a reward model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.supervised import SupervisedConfig

__all__ = ["CONFIG", "RewardModelConfig", "RewardModelSection"]


class RewardModelSection(Section):
    """How scores are learned."""

    loss: Literal["bradley_terry", "regression"] = option(
        "bradley_terry",
        "`bradley_terry`: of two answers the chosen one scores higher, by a row's margin where it has one. "
        "`regression`: each answer has the score that its row says.",
    )
    centering: float = option(
        0.0, "Of `bradley_terry`: weight of what keeps scores around 0; 0.01 is usual (arXiv 2312.09244).", ge=0
    )


class RewardModelConfig(SupervisedConfig):
    """A reward model: one score for a whole conversation, for `reward: {type: reward_model, path: …}` and others."""

    pipeline: Literal["reward_model"] = option("reward_model", "Which pipeline runs.")
    reward_model: RewardModelSection = option(RewardModelSection(), "Loss of the reward model.")

    @model_validator(mode="after")
    def _settings_apply(self) -> Self:
        if self.reward_model.loss == "regression" and self.reward_model.centering:
            raise ValueError("reward_model.centering is for pairs: a regression's scores are where its rows put them")
        if self.evaluation.answers is not None:
            raise ValueError("a reward model writes nothing: remove evaluation.answers")
        return self


CONFIG = RewardModelConfig
