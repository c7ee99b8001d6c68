"""The configuration of rejection sampling: iterated fine-tuning on the policy's own best answers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.online import OnlineConfig

__all__ = ["CONFIG", "RejectionConfig", "RejectionSamplingConfig"]


class RejectionConfig(Section):
    """Which answers are trained on."""

    keep: int = option(1, "The best answers to a prompt, at most; of equal ones the first.", ge=1)
    min_reward: float = option(1.0, "An answer with a lower reward is not kept.")
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "Whether every token counts alike, or every answer."
    )


class RejectionSamplingConfig(OnlineConfig):
    """Sample, verify, keep the best answers, and fine-tune on them (RAFT, arXiv 2304.06767)."""

    pipeline: Literal["rejection_sampling"] = option("rejection_sampling", "Which pipeline runs.")
    rejection: RejectionConfig = option(RejectionConfig(), "Answers to train on.")

    @model_validator(mode="after")
    def _enough(self) -> RejectionSamplingConfig:
        if self.rejection.keep > self.rollout.group_size:
            raise ValueError(
                f"rejection.keep {self.rejection.keep} exceeds rollout.group_size {self.rollout.group_size}: lower the "
                "one or raise the other"
            )
        return self


CONFIG = RejectionSamplingConfig
