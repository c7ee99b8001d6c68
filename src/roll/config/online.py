"""Configuration of runs that learn from fresh rollouts without an `algorithm`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from roll.config.algorithm_parts import UpdateConfig
from roll.config.base import option
from roll.config.engines import LOGPROBS, EngineNeed
from roll.config.generating import PromptedConfig

__all__ = ["OnlineConfig"]


class OnlineConfig(PromptedConfig):
    """Fresh rollouts in every step, and updates from them."""

    updates: UpdateConfig = option(UpdateConfig(), "How often a step's batch is used.")

    @model_validator(mode="after")
    def _as_far_as_it_goes(self) -> Self:
        scheduling, name = self.rollout.scheduling, self.pipeline
        if scheduling.reward_range is not None:
            raise ValueError(
                f"rollout.scheduling.reward_range is for filters of an `algorithm`, which the pipeline {name} does not "
                "have: remove it"
            )
        if self.tracking.record_rollouts:
            raise ValueError(
                f"tracking.record_rollouts keeps rollouts for `roll replay`, which cannot replay a run of the pipeline "
                f"{name}: set it to false"
            )
        shown = [entry.domain or entry.source for entry in self.data if entry.has_demonstrations]
        if shown:
            raise ValueError(
                f"data source '{shown[0]}' brings demonstrations, which the pipeline {name} does not imitate: remove "
                "expert_key (demonstrations), or set pipeline to rlvr"
            )
        parts, prompts = self.updates.num_minibatches, self.rollout.prompts_per_step
        if parts > prompts:
            raise ValueError(
                f"updates.num_minibatches {parts} exceeds rollout.prompts_per_step {prompts}, but a mini-batch is made "
                "of whole groups: lower the one or raise the other"
            )
        return self

    @property
    def engine_needs(self) -> list[EngineNeed]:
        """See `GeneratingConfig.engine_needs`."""
        return [*super().engine_needs, LOGPROBS]

    @property
    def updates_per_step(self) -> int:
        """Maximum number of optimizer steps in a step."""
        return self.updates.num_epochs * self.updates.num_minibatches
