"""Time-sharing of devices by engines and trainers: one side releases the devices while the other uses them.

    trainers compute              │ weight sync                   │ engines generate
    ──────────────────────────────┼───────────────────────────────┼────────────────────────────────────
    engines sleep: no weights,    │ engines wake, and get all     │ trainers' states are in host memory
    no KV cache                   │ weights from the policy       │

`roll.rollout.sharing` describes the rules of `cluster.sharing`. `SharedDevices` stores the current phase and performs
the switches; `ServedPolicy` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal, Protocol, TypeAlias

from roll.config.rollout_run import RolloutRunConfig
from roll.config.sharing import SharingRule
from roll.inference import get_engine_capabilities
from roll.protocols import StateKind, TrainerGroup
from roll.rollout.sharing import OverlapState, predict_saved_s

__all__ = ["ALL_STATE_KINDS", "SharedDevices", "list_released_engines", "resolve_sharing_rule"]

Phase: TypeAlias = Literal["generation", "training"]
ALL_STATE_KINDS: tuple[StateKind, ...] = ("parameters", "optimizer")


def resolve_sharing_rule(config: RolloutRunConfig, *, accelerated: bool) -> SharingRule:
    """Return the rule of a run; `auto` is resolved as `cluster.sharing` describes.

    Args:
        config: Configuration of the run.
        accelerated: Whether the run's devices are accelerators.

    Raises:
        ConfigError: The configured engine is unknown.
    """
    rule, num_shared = config.cluster.sharing, len(config.find_shared_engines())
    if rule != "auto":
        return rule
    can_sleep = get_engine_capabilities(config.inference.engine).can_sleep
    if not (can_sleep and accelerated and num_shared) or config.streams_training:
        return "disaggregated"
    if config.rollout.scheduling.async_ratio == 0:
        return "colocated"
    return "elastic_overlap" if num_shared < config.num_engines else "disaggregated"


def list_released_engines(config: RolloutRunConfig, rule: SharingRule) -> list[int]:
    """Return the indices of the engines that release their devices under a rule."""
    if rule == "disaggregated":
        return []
    return list(range(config.num_engines)) if rule == "colocated" else config.find_shared_engines()


class ReleasableEngines(Protocol):
    """Interface of engines that release their devices; `EngineTransitions` implements it."""

    async def release(self, engine_ids: Collection[str]) -> None: ...

    async def reacquire(self, engine_ids: Collection[str]) -> None: ...

    async def serve(self, engine_ids: Collection[str], synced: Collection[str]) -> None: ...


class SharedDevices:
    """Stores the phase of the devices that engines and trainers share, and performs all switches between phases.

    Invariants:
        - In the phase `training`, the engines on these devices have released them, and all trainer states are on them.
        - In the phase `generation`, the state of engines and trainers is undefined until `serve` has ended. A failed or
          canceled switch is repeated from the beginning.

    Args:
        policy: Trainer whose weights are synced to the engines.
        trainers: Trainers on the devices; the policy's trainer may be among them.
        engine_ids: Ids of the engines that release their devices.
        rule: The rule of `cluster.sharing`.
    """

    def __init__(
        self,
        policy: TrainerGroup,
        trainers: Sequence[TrainerGroup],
        engine_ids: Collection[str],
        rule: SharingRule = "colocated",
    ) -> None:
        self.phase: Phase = "generation"
        self.rule: SharingRule = rule
        self.engine_ids = tuple(engine_ids)
        self.is_reserved = False
        """True in the phase `training` if no engine generates on the devices before the next update."""
        self.overlap = OverlapState()
        self._policy = policy
        self._trainers = trainers
        self._engines: ReleasableEngines | None = None
        self._pause_pushes: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
        self._phase_began_s = self._measured_s = asyncio.get_running_loop().time()
        self._generation_s = 0.0
        """Seconds since `_measured_s` in which the engines generated on the devices."""
        self._switch_s = 0.0
        """Duration of the last switch to training, in seconds, and of the switch back as far as it is done."""
        self._num_finished = 0

    def attach_engines(
        self, engines: ReleasableEngines, pause_pushes: Callable[[], AbstractAsyncContextManager[object]]
    ) -> None:
        """Set the engines that run on these devices, and a context that excludes weight syncs."""
        self._engines = engines
        self._pause_pushes = pause_pushes

    async def switch_to_training(self) -> None:
        """Release the devices of the engines, then onload the trainers for training or a checkpoint."""
        assert self._engines is not None, "engines must be attached first"
        began_s = asyncio.get_running_loop().time()
        # In this order: trainers need the memory that engines release.
        await self._engines.release(self.engine_ids)
        async with self._pause_pushes():  # the sync of a single engine offloads the policy's weights when it ends
            await asyncio.gather(*(trainer.onload(ALL_STATE_KINDS) for trainer in self._trainers))
            now_s = asyncio.get_running_loop().time()
            self._generation_s += began_s - self._phase_began_s
            self.phase, self._phase_began_s, self._switch_s = "training", now_s, now_s - began_s

    async def switch_to_generation(self) -> None:
        """Offload all trainer states that a weight sync does not need, then allocate the engines' memory.

        The engines generate after a weight sync and `serve`.
        """
        assert self._engines is not None, "engines must be attached first"
        began_s = asyncio.get_running_loop().time()
        self.phase, self.is_reserved = "generation", False
        # The policy's weights stay: the weight sync that follows reads them.
        offloaded = ((each, ("optimizer",) if each is self._policy else ALL_STATE_KINDS) for each in self._trainers)
        await asyncio.gather(*(trainer.offload(states) for trainer, states in offloaded))
        await self._engines.reacquire(self.engine_ids)
        self._switch_s += asyncio.get_running_loop().time() - began_s

    async def serve(self, synced: Collection[str]) -> None:
        """Let the engines generate on the devices again.

        Args:
            synced: Ids of all engines that got the current weights.
        """
        assert self._engines is not None, "engines must be attached first"
        await self._engines.serve(self.engine_ids, synced)
        self.overlap = self.overlap.record_switch(self._switch_s)
        self._phase_began_s = asyncio.get_running_loop().time()

    def record_generation(self, num_finished: int, num_kept: int) -> None:
        """Measure the pace of generation since the last call; must be called in the phase `training`.

        Args:
            num_finished: Number of groups that have finished since the start of the run.
            num_kept: Number of engines that do not share the devices.
        """
        now_s = asyncio.get_running_loop().time()
        engine_s = num_kept * (now_s - self._measured_s) + len(self.engine_ids) * self._generation_s
        self.overlap = self.overlap.record_generation(num_finished - self._num_finished, engine_s)
        self._num_finished, self._measured_s, self._generation_s = num_finished, now_s, 0.0

    def should_generate(self, num_missing: int, num_kept: int) -> bool:
        """Return whether engines should generate on the devices until the next update.

        Args:
            num_missing: Number of groups of the next batch that have not finished.
            num_kept: Number of engines that do not share the devices.
        """
        if self.rule != "elastic_overlap":
            return True
        pace = self.overlap.groups_per_engine_s
        return self.overlap.should_generate(predict_saved_s(num_missing, pace, num_kept, len(self.engine_ids)))

    @asynccontextmanager
    async def onload_for_sync(self) -> AsyncIterator[None]:
        """Onload the policy's weights for a weight sync; offload them on exit, unless the trainers use the devices."""
        if self._policy not in self._trainers or self.phase == "training":
            yield
            return
        await self._policy.onload(["parameters"])
        try:
            yield
        finally:
            await self._policy.offload(["parameters"])
