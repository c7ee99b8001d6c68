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
from roll.inference import engine_capabilities
from roll.protocols import StateKind, TrainerGroup

__all__ = ["EVERYTHING", "SharingTrainers", "hands_over"]

EVERYTHING: tuple[StateKind, ...] = ("parameters", "optimizer")


def hands_over(config: GeneratingConfig, *, accelerated: bool) -> bool:
    """Return whether engines and the trainers on their devices hand memory over to each other.

    Args:
        config: of the run.
        accelerated: whether its devices are accelerators.

    Raises:
        ConfigError: there are no such engines.
    """
    asked = config.cluster.hand_over
    if asked != "auto":
        return asked
    can, ahead = engine_capabilities(config.inference.engine).can_sleep, config.rollout.scheduling.async_ratio > 0
    return can and accelerated and not ahead and bool(config.trainers_beside("actor_infer"))


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
