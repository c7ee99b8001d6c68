"""Engines and trainers that share devices hand the memory over: the one sleeps while the other works.

    trainers compute              │ weight sync                   │ engines answer
    ──────────────────────────────┼───────────────────────────────┼────────────────────────────────────
    engines sleep: no weights,    │ engines wake, and get all     │ trainers' states are in main memory
    no keys and values            │ weights from the policy       │

Here is the trainers' side; whose turn it is, `LivePolicy` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roll.config.generating import GeneratingConfig
from roll.errors import ConfigError
from roll.inference import resolve_engine_kind
from roll.inference.vllm.environment import is_cpu_build
from roll.protocols import StateKind, TrainerGroup

__all__ = ["EVERYTHING", "SharingTrainers", "hands_over"]

EVERYTHING: tuple[StateKind, ...] = ("parameters", "optimizer")


def hands_over(config: GeneratingConfig, *, accelerated: bool) -> bool:
    """Whether engines and the trainers on their devices hand memory over to each other.

    Args:
        config: of the run.
        accelerated: whether its devices are accelerators.

    Raises:
        ConfigError: it is asked for, and the engines cannot sleep here.
    """
    asked = config.cluster.hand_over
    can = resolve_engine_kind(config.inference.engine) != "vllm" or not is_cpu_build()
    if asked == "auto":
        ahead = config.rollout.scheduling.async_ratio > 0
        return can and accelerated and not ahead and bool(config.trainers_beside("actor_infer"))
    if asked and not can:
        raise ConfigError(
            "cluster.hand_over is true, but vLLM cannot give its memory back on a CPU: set it to auto, or "
            "inference.engine to hf."
        )
    return asked


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingTrainers:
    """Trainers on devices that engines use too."""

    policy: TrainerGroup
    """Whose weights engines get."""
    trainers: Sequence[TrainerGroup]
    """Those that share devices, the policy's among them or not."""

    async def step_aside(self) -> None:
        """Move all to main memory but what the weight sync that follows needs."""
        aside = ((t, ("optimizer",) if t is self.policy else EVERYTHING) for t in self.trainers)
        await asyncio.gather(*(trainer.offload(states) for trainer, states in aside))

    async def come_back(self) -> None:
        """Move all to the devices, for training or a checkpoint."""
        await asyncio.gather(*(trainer.onload(EVERYTHING) for trainer in self.trainers))

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Inside, a weight sync finds the policy's weights on their device; engines answer afterwards."""
        if self.policy not in self.trainers:
            yield
            return
        await self.policy.onload(["parameters"])
        try:
            yield
        finally:
            await self.policy.offload(["parameters"])
