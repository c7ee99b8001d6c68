"""The run and the objective of a simulation, for the training loop of real runs (`roll.pipelines.online.loop`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from roll.config.simulation import SimulationConfig
from roll.pipelines.colocation import SharedDevices
from roll.pipelines.online.protocols import CollectedBatch, UpdateOutcome
from roll.pipelines.state import RunState
from roll.rollout.batch import Batch
from roll.rollout.controller import AsyncController
from roll.rollout.engine_widths import EngineWidths
from roll.rollout.proxy import LLMProxy
from roll.rollout.streaming import collect_batch
from roll.simulation.batch import BatchTotals
from roll.simulation.recorder import Recorder, StepRecord
from roll.simulation.roles import SimulatedEngines, SimulatedTrainer
from roll.types import Group

__all__ = ["SimulatedPolicyEngines", "SimulatedSteps", "find_rejection_reason"]

T = TypeVar("T")


def find_rejection_reason(group: Group) -> str:
    """Return the reason why dynamic sampling rejects a group (all rewards are equal); an empty string if the group is
    accepted."""
    values = {rollout.reward.value for rollout in group.scored_rollouts if rollout.reward is not None}
    return "all rewards are equal" if len(values) < 2 else ""


@dataclass(frozen=True, slots=True)
class SimulatedPolicyEngines:
    """Implements the training loop's `Engines` interface with simulated engines."""

    engines: SimulatedEngines
    proxy: LLMProxy
    controller: AsyncController
    recorder: Recorder
    state: RunState
    devices: SharedDevices | None = None
    """Devices that engines and trainer share; `None` if switches are not simulated."""

    async def wake(self) -> None:
        """Do nothing, because a simulation saves no checkpoint between two steps."""

    @asynccontextmanager
    async def enter_training(self) -> AsyncIterator[None]:
        """Return a context manager within which the trainer may compute; engines release shared devices on entry."""
        await self.release_devices()
        yield

    async def release_devices(self) -> None:
        """Switch the shared devices to training."""
        if self.devices is not None and self.devices.phase == "generation":
            with self.recorder.phase("switch"):
                await self.devices.switch_to_training()

    def is_stream_due(self, num_groups: int) -> bool:
        """Return whether the trainer should start on the `num_groups` finished groups before the batch is complete."""
        return self.devices is None or self.devices.is_stream_due(num_groups)

    def record_stream(self, batch: Batch, *, wait_s: float, step_s: float) -> None:
        """Record a batch whose groups could be passed to the trainer before the batch was complete."""
        if self.devices is not None:
            self.devices.record_stream(batch, wait_s=wait_s, step_s=step_s)

    async def push(self) -> Mapping[str, float]:
        """Sync the new weights to every engine that is awake."""
        devices = self.devices if self.devices is not None and self.devices.should_return() else None
        if devices is not None:
            with self.recorder.phase("switch"):
                await devices.switch_to_generation()
        with self.recorder.phase("sync"):
            if self.devices is None:
                await self.proxy.wait_for_replacements()
            async with self.controller.pause_for_update():
                synced, dead = await self.engines.sync(self.state.policy_version)
            self.proxy.start_replacing(dead)
            if self.devices is None:
                await self.proxy.wait_for_replacements()
        if devices is not None:
            await devices.serve(synced)
        return {}


@dataclass(kw_only=True, slots=True)
class SimulatedSteps:
    """A `StepRun` that records its steps. It is also the `Objective`: it trains on all groups that are not rejected."""

    config: SimulationConfig
    controller: AsyncController
    engines: SimulatedEngines
    policy_engines: SimulatedPolicyEngines
    trainer: SimulatedTrainer
    recorder: Recorder
    state: RunState
    widths: EngineWidths | None = None
    """Engines of several widths; `None` if all have the same width."""
    _streamed: set[int] = field(default_factory=set)
    """Draws of the step whose gradients were computed while other groups were generated."""
    _collected: CollectedBatch[list[Group]] | None = None

    # ---- the run

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[None]:
        """Return a context manager for all steps; the engines have the initial weights from the start."""
        yield
        await self.controller.close()

    async def run_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """Run and record all steps."""
        while self.state.step < self.config.num_steps:
            start, before = asyncio.get_running_loop().time(), self.engines.sum_totals()
            busy_s = self.engines.sum_busy_device_s()
            self.recorder.phases_s.clear()
            await step()
            busy_s = self.engines.sum_busy_device_s() - busy_s
            self.recorder.add_step(self._build_record(start, before, busy_s), start)

    async def next_batch(self) -> Batch:
        """Wait for the next batch; with `stream_training`, compute gradients of finished groups while waiting."""
        size, engines = self.config.rollout.prompts_per_step, self.policy_engines
        with self.recorder.phase("wait for batch"):
            if self.config.streams_training or self._overlaps:
                return await collect_batch(self.controller, engines, size, self._stream)
            return await self.controller.next_batch()

    @property
    def _overlaps(self) -> bool:
        """True if training on finished groups begins before the batch is complete."""
        training = self.config.training
        is_elastic = self.config.placement.sharing == "elastic_overlap"
        return is_elastic and training.num_updates == 1 and training.duration is None

    async def run_unless_stopped(self, coroutine: Awaitable[T]) -> T:
        """Return the result of `coroutine`; no signal stops a simulation."""
        return await coroutine

    def advance_policy_version(self) -> None:
        """Increase the policy version by 1."""
        self.state.policy_version += 1

    async def finish_step(
        self, collected: CollectedBatch[list[Group]], update: UpdateOutcome, update_state: Callable[[], None]
    ) -> list[str]:
        """Release the groups of the step, and launch the next groups."""
        trained = {rollout.rollout_id for rollout in collected.rollouts}
        await self.controller.complete_step(self.state.policy_version, trained)
        self.state.step += 1
        self._collected = collected
        return []

    async def evaluate(self) -> None:
        """Do nothing, because a simulation has no evaluation."""

    # ---- the objective

    async def collect(self, batch: Batch) -> CollectedBatch[list[Group]]:
        """Choose all groups that are not rejected."""
        trained = [group for group in batch.groups if group.draw.draw_id not in batch.rejection_reasons]
        rollouts = tuple(rollout for group in trained for rollout in group.scored_rollouts)
        return CollectedBatch(batch=batch, choice=trained, rollouts=rollouts, draw_outcomes={})

    async def learn(self, collected: CollectedBatch[list[Group]]) -> UpdateOutcome:
        """Update the policy with the groups that were not passed to the trainer early."""
        left = [group for group in collected.choice if group.draw.draw_id not in self._streamed]
        with self.recorder.phase("train"):
            await self.trainer.update(self.state.step + 1, left)
        return UpdateOutcome(has_new_weights=True)

    def update_state(self, collected: CollectedBatch[list[Group]]) -> None:
        """Do nothing, because the objective has no state."""

    async def _stream(self, groups: Sequence[Group]) -> None:
        accepted = [g for g in groups if not self.config.reward.filter_groups or not find_rejection_reason(g)]
        self._streamed.update(group.draw.draw_id for group in accepted)
        await self.trainer.accumulate(self.state.step + 1, accepted)

    # ---- the record

    def _build_record(self, start: float, before: BatchTotals, busy_s: float) -> StepRecord:
        assert self._collected is not None, "the step is finished"
        batch, spent_s, parts = self._collected.batch, self.recorder.phases_s, self.config.training.num_updates
        after, total = self.engines.sum_totals(), asyncio.get_running_loop().time() - start
        answers = [len(rollout.token_ids) for rollout in self._collected.rollouts]
        return StepRecord(
            step=self.state.step,
            kind=batch.kind,
            total_s=total / parts,
            wait_s=spent_s["wait for batch"] / parts,
            train_s=spent_s["train"] / parts,
            sync_s=spent_s["sync"] / parts,
            num_samples=len(answers) // parts,
            num_tokens=sum(answers) // parts,
            longest=max(answers, default=0),
            max_staleness=max(batch.staleness, default=0) + parts - 1,
            num_expired=len(batch.expired),
            busy_share=busy_s / (total * self.config.placement.generation) if total else 0.0,
            tokens_per_s=(after.num_generated - before.num_generated) / total if total else 0.0,
            num_preempted=after.num_preempted - before.num_preempted,
            num_filtered=len(batch.rejection_reasons),
            width=self.widths.width if self.widths is not None else self.config.engine.width,
        )
