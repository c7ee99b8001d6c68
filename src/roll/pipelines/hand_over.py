"""Engines and trainers that share devices hand the memory over: the one sleeps while the other works.

    trainers compute              │ weight sync                   │ engines answer
    ──────────────────────────────┼───────────────────────────────┼────────────────────────────────────
    engines sleep: no weights,    │ engines wake, and get all     │ trainers' states are in main memory
    no keys and values            │ weights from the policy       │

`SharedDevices` knows whose phase it is; when it ends, `LivePolicy` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeAlias

from roll.config.generating import GeneratingConfig
from roll.inference import engine_capabilities
from roll.protocols import StateKind, TrainerGroup

__all__ = ["EVERYTHING", "SharedDevices", "hands_over"]

Phase: TypeAlias = Literal["generation", "training"]
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


class SleepingEngines(Protocol):
    """Engines on shared devices; `LLMProxy` has these methods."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class SharedDevices:
    """The devices that engines and trainers share, and whose phase it is: the only way from one to the other.

    Invariants:
        - in the phase `training` engines sleep, and all states of trainers are where they compute;
        - in the phase `generation` nothing is known of either until a weight sync has ended: a way there that broke off
          is gone again from its beginning.

    Args:
        policy: the trainer whose weights engines get.
        trainers: those on the devices, the policy's among them or not.
    """

    def __init__(self, policy: TrainerGroup, trainers: Sequence[TrainerGroup]) -> None:
        self.phase: Phase = "generation"
        self._policy = policy
        self._trainers = trainers
        self._engines: SleepingEngines | None = None

    def join(self, engines: SleepingEngines) -> None:
        """Let the engines that answer on these devices be known, once they are."""
        self._engines = engines

    async def to_training(self) -> None:
        """Let engines sleep, then give trainers the memory, for training or a checkpoint."""
        assert self._engines is not None, "engines have joined"
        await self._engines.sleep()
        await asyncio.gather(*(trainer.onload(EVERYTHING) for trainer in self._trainers))
        self.phase = "training"

    async def to_generation(self) -> None:
        """Take from trainers all but what a weight sync needs, then wake the engines."""
        assert self._engines is not None, "engines have joined"
        self.phase = "generation"
        aside = ((each, ("optimizer",) if each is self._policy else EVERYTHING) for each in self._trainers)
        await asyncio.gather(*(trainer.offload(states) for trainer, states in aside))
        await self._engines.wake()

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Run the body, a weight sync, with the policy's weights on their device; engines answer afterwards."""
        if self._policy not in self._trainers:
            yield
            return
        await self._policy.onload(["parameters"])
        try:
            yield
        finally:
            await self._policy.offload(["parameters"])
