"""The configuration of rejection sampling: iterated fine-tuning on the policy's best answers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.online import OnlineConfig

__all__ = ["RejectionConfig", "RejectionSamplingConfig"]


class RejectionConfig(Section):
    """Selection of the answers to train on."""

    keep: int = option(1, "Maximum number of best answers per prompt; ties go to the first.", ge=1)
    min_reward: float = option(1.0, "Minimum reward of an answer to train on.")
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "Whether every token has the same weight, or every answer."
    )


class RejectionSamplingConfig(OnlineConfig):
    """Sample, verify, keep the best answers, and fine-tune on them (RAFT, arXiv 2304.06767)."""

    pipeline: Literal["rejection_sampling"] = option("rejection_sampling", "Name of the pipeline.")
    rejection: RejectionConfig = option(RejectionConfig(), "Selection of the answers to train on.")

    @model_validator(mode="after")
    def _check_keep(self) -> RejectionSamplingConfig:
        if self.rejection.keep > self.rollout.group_size:
            raise ValueError(
                f"rejection.keep must be <= rollout.group_size, got {self.rejection.keep} and "
                f"{self.rollout.group_size}: lower keep, or raise group_size"
            )
        return self
