"""Hand-over of device memory between engines and trainers on shared devices: one sleeps while the other works.

    trainers compute              │ weight sync                   │ engines answer
    ──────────────────────────────┼───────────────────────────────┼────────────────────────────────────
    engines sleep: no weights,    │ engines wake, and get all     │ trainers' states are in host memory
    no KV cache                   │ weights from the policy       │

`SharedDevices` holds the current phase; `LivePolicy` decides when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeAlias

from roll.config.generating import GeneratingConfig
from roll.inference import engine_capabilities
from roll.protocols import StateKind, TrainerGroup

__all__ = ["EVERYTHING", "SharedDevices", "offloads_colocated"]

Phase: TypeAlias = Literal["generation", "training"]
EVERYTHING: tuple[StateKind, ...] = ("parameters", "optimizer")


def offloads_colocated(config: GeneratingConfig, *, accelerated: bool) -> bool:
    """Return whether engines and the trainers on their devices hand memory over to each other.

    Args:
        config: Configuration of the run.
        accelerated: Whether its devices are accelerators.

    Raises:
        ConfigError: The configured engine is unknown.
    """
    asked = config.cluster.offload_colocated
    if asked != "auto":
        return asked
    can, ahead = engine_capabilities(config.inference.engine).can_sleep, config.rollout.scheduling.async_ratio > 0
    return can and accelerated and not ahead and bool(config.colocated_trainers("actor_infer"))


class SleepingEngines(Protocol):
    """Engines on shared devices; `LLMProxy` has these methods."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class SharedDevices:
    """The devices that engines and trainers share, and the current phase; it makes all transitions between phases.

    Invariants:
        - in the phase `training` engines sleep, and all states of trainers are on their devices;
        - in the phase `generation` the state of both is undefined until a weight sync has ended: a transition that
          failed is repeated from its beginning.

    Args:
        policy: Trainer whose weights engines get.
        trainers: Trainers on the devices, with or without the policy's.
    """

    def __init__(self, policy: TrainerGroup, trainers: Sequence[TrainerGroup]) -> None:
        self.phase: Phase = "generation"
        self._policy = policy
        self._trainers = trainers
        self._engines: SleepingEngines | None = None

    def join(self, engines: SleepingEngines) -> None:
        """Set the engines that run on these devices."""
        self._engines = engines

    async def to_training(self) -> None:
        """Put engines to sleep, then onload trainers, for training or a checkpoint."""
        assert self._engines is not None, "engines have joined"
        await self._engines.sleep()
        await asyncio.gather(*(trainer.onload(EVERYTHING) for trainer in self._trainers))
        self.phase = "training"

    async def to_generation(self) -> None:
        """Offload all states of trainers that a weight sync does not need, then wake the engines."""
        assert self._engines is not None, "engines have joined"
        self.phase = "generation"
        offloaded = ((each, ("optimizer",) if each is self._policy else EVERYTHING) for each in self._trainers)
        await asyncio.gather(*(trainer.offload(states) for trainer, states in offloaded))
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
