"""Time-sharing of device memory by engines and trainers on shared devices: one side is offloaded while the other
computes.

    trainers compute              │ weight sync                   │ engines answer
    ──────────────────────────────┼───────────────────────────────┼────────────────────────────────────
    engines sleep: no weights,    │ engines wake, and get all     │ trainers' states are in host memory
    no KV cache                   │ weights from the policy       │

`SharedDevices` holds the current phase; `ServedPolicy` decides when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeAlias

from roll.config.rollout_run import RolloutRunConfig
from roll.inference import get_engine_capabilities
from roll.protocols import StateKind, TrainerGroup

__all__ = ["ALL_STATE_KINDS", "SharedDevices", "should_offload_colocated"]

Phase: TypeAlias = Literal["generation", "training"]
ALL_STATE_KINDS: tuple[StateKind, ...] = ("parameters", "optimizer")


def should_offload_colocated(config: RolloutRunConfig, *, accelerated: bool) -> bool:
    """Return whether engines and trainers on the same devices take turns.

    If so, the trainers offload while the engines run, and the engines sleep while the trainers run.

    Args:
        config: Configuration of the run.
        accelerated: Whether the run's devices are accelerators.

    Raises:
        ConfigError: The configured engine is unknown.
    """
    setting = config.cluster.offload_colocated
    if setting != "auto":
        return setting
    scheduling = config.rollout.scheduling
    overlap = scheduling.async_ratio > 0 or scheduling.stream_training
    can = get_engine_capabilities(config.inference.engine).can_sleep
    return can and accelerated and not overlap and bool(config.find_colocated_trainers("actor_infer"))


class SleepingEngines(Protocol):
    """Interface of the engines that `SharedDevices` puts to sleep and wakes; `LLMProxy` implements it."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class SharedDevices:
    """Stores the phase of the devices that engines and trainers share, and performs all transitions between phases.

    Invariants:
        - In the phase `training`, the engines sleep, and all trainer states are on the devices.
        - In the phase `generation`, the state of engines and trainers is undefined until a weight sync has ended. A
          failed transition is repeated from the beginning.

    Args:
        policy: Trainer whose weights are synced to the engines.
        trainers: Trainers on the devices; the policy's trainer may be among them.
    """

    def __init__(self, policy: TrainerGroup, trainers: Sequence[TrainerGroup]) -> None:
        self.phase: Phase = "generation"
        self._policy = policy
        self._trainers = trainers
        self._engines: SleepingEngines | None = None

    def attach_engines(self, engines: SleepingEngines) -> None:
        """Set the engines that run on these devices."""
        self._engines = engines

    async def switch_to_training(self) -> None:
        """Put the engines to sleep, then onload the trainers for training or a checkpoint."""
        assert self._engines is not None, "engines must be attached first"
        # In this order: trainers need the memory that engines release.
        await self._engines.sleep()
        await asyncio.gather(*(trainer.onload(ALL_STATE_KINDS) for trainer in self._trainers))
        self.phase = "training"

    async def switch_to_generation(self) -> None:
        """Offload all trainer states that a weight sync does not need, then wake the engines."""
        assert self._engines is not None, "engines must be attached first"
        self.phase = "generation"
        # The policy's weights stay: the weight sync that follows reads them.
        offloaded = ((each, ("optimizer",) if each is self._policy else ALL_STATE_KINDS) for each in self._trainers)
        await asyncio.gather(*(trainer.offload(states) for trainer, states in offloaded))
        await self._engines.wake()

    @asynccontextmanager
    async def onload_for_sync(self) -> AsyncIterator[None]:
        """Onload the policy's weights for a weight sync; offload them on exit."""
        if self._policy not in self._trainers:
            yield
            return
        await self._policy.onload(["parameters"])
        try:
            yield
        finally:
            await self._policy.offload(["parameters"])
