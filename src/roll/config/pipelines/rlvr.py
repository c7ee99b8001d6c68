"""The configuration of reinforcement learning with verifiable rewards, and everything that is derived from it."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import option
from roll.config.generating import PromptedConfig
from roll.config.reinforcing import ReinforcingConfig
from roll.config.replay import ReplayConfig

__all__ = ["CONFIG", "RLVRConfig"]


class RLVRConfig(PromptedConfig, ReinforcingConfig):
    """Reinforcement learning with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", "Which pipeline runs.")
    replay: ReplayConfig | None = option(None, "A recorded run that is run again; `roll replay` sets it.")

    @model_validator(mode="after")
    def _recorded_once(self) -> RLVRConfig:
        if self.replay is not None and self.tracking.record_rollouts:
            raise ValueError(
                "tracking.record_rollouts would record what replay.run has recorded already: set it to false"
            )
        return self

    @property
    def starts_engines(self) -> bool:
        """See `RunConfig.starts_engines`: recorded batches need none."""
        return self.replay is None or self.replay.only == "rollout"


CONFIG = RLVRConfig
