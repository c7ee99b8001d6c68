"""The configuration of reinforcement learning with verifiable rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import option
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.config.replay import ReplayConfig
from roll.config.rollout_run import PromptRunConfig

__all__ = ["RLVRConfig"]


class RLVRConfig(PromptRunConfig, ReinforcementRunConfig):
    """Reinforcement learning with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", "Name of the pipeline.")
    replay: ReplayConfig | None = option(None, "Replay of a recorded run; `roll replay` sets this section.")

    @model_validator(mode="after")
    def _check_recording(self) -> RLVRConfig:
        if self.replay is not None and self.tracking.record_rollouts:
            raise ValueError(
                "tracking.record_rollouts is not supported in a replay, whose batches are already recorded: set "
                "tracking.record_rollouts to false"
            )
        return self

    @property
    def starts_engines(self) -> bool:
        """True if the run has engines that generate; training on recorded batches needs none."""
        return self.replay is None or self.replay.only == "rollout"
