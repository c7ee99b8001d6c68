"""The `deepspeed` training backend."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["DeepSpeedConfig"]


class DeepSpeedConfig(Section):
    """Sharding (ZeRO, arXiv 1910.02054) and offload to host memory with `training.backend: deepspeed`."""

    zero_stage: Literal[0, 1, 2, 3] = option(
        2,
        "ZeRO stage. 0: nothing is sharded over the ranks. 1: optimizer states are sharded. 2: gradients are sharded "
        "as well. 3: weights are sharded as well. Stage 0 supports only float32.",
    )
    offload_optimizer: bool = option(
        False,
        "Whether optimizer states are offloaded to host memory and the update runs on the CPU; requires stage 1 or "
        "higher.",
    )
    offload_parameters: bool = option(False, "Whether unused weights are offloaded to host memory; requires stage 3.")

    @model_validator(mode="after")
    def _check_offloading(self) -> DeepSpeedConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer requires zero_stage >= 1: with stage 0, DeepSpeed offloads nothing")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters requires zero_stage 3, got {self.zero_stage}")
        return self
