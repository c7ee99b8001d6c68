"""The `deepspeed` training backend."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["DeepSpeedConfig"]


class DeepSpeedConfig(Section):
    """What `training.backend: deepspeed` shards over the ranks (ZeRO, arXiv 1910.02054) and offloads to host memory."""

    zero_stage: Literal[0, 1, 2, 3] = option(
        2,
        "Ranks share: nothing (0), the optimiser's states (1), gradients too (2), weights too (3). "
        "0 computes in float32 only.",
    )
    offload_optimizer: bool = option(
        False, "Keep the optimiser's states in main memory and update there; from ZeRO stage 1 on."
    )
    offload_parameters: bool = option(False, "Keep weights that are not being computed with in main memory; stage 3.")

    @model_validator(mode="after")
    def _can_offload(self) -> DeepSpeedConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs a zero_stage from 1 on: with 0, DeepSpeed offloads nothing")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs zero_stage 3, not {self.zero_stage}")
        return self
