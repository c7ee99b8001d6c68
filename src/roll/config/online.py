"""Common base of the configurations of runs that learn from rollouts without an `algorithm`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from roll.config.algorithm_parts import UpdateConfig
from roll.config.base import option
from roll.config.engines import LOGPROBS, EngineRequirement
from roll.config.rollout_run import PromptRunConfig

__all__ = ["OnlineConfig"]


class OnlineConfig(PromptRunConfig):
    """A run that generates rollouts in every step and trains on them, without an RL algorithm."""

    updates: UpdateConfig = option(UpdateConfig(), "Mini-batches and epochs of each step's batch.")

    @model_validator(mode="after")
    def _reject_unsupported_keys(self) -> Self:
        scheduling, name = self.rollout.scheduling, self.pipeline
        if scheduling.reward_range is not None:
            raise ValueError(
                f"rollout.scheduling.reward_range is not supported with the pipeline {name}, which has no "
                "`algorithm.filters`: remove reward_range"
            )
        if self.tracking.record_rollouts:
            raise ValueError(
                f"tracking.record_rollouts is not supported with the pipeline {name}, because `roll replay` does not "
                "support this pipeline: set record_rollouts to false"
            )
        shown = [entry.domain or entry.source for entry in self.data if entry.has_demonstrations]
        if shown:
            raise ValueError(
                f"data source '{shown[0]}' has demonstrations, but the pipeline {name} does not imitate them: remove "
                "expert_key (demonstrations), or set pipeline to rlvr"
            )
        parts, prompts = self.updates.num_minibatches, self.rollout.prompts_per_step
        if parts > prompts:
            raise ValueError(
                "updates.num_minibatches must be <= rollout.prompts_per_step, because a mini-batch contains at least "
                f"one group, got {parts} and {prompts}: lower num_minibatches, or raise prompts_per_step"
            )
        return self

    @property
    def required_engine_capabilities(self) -> list[EngineRequirement]:
        """Capabilities that the run requires from its engines, including log-probs of sampled tokens."""
        return [*super().required_engine_capabilities, LOGPROBS]

    @property
    def updates_per_step(self) -> int:
        """Maximum number of optimizer steps in a step."""
        return self.updates.num_epochs * self.updates.num_minibatches
