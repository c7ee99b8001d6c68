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
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal, Protocol, TypeAlias

from roll.config.rollout_run import RolloutRunConfig
from roll.config.sharing import SharingRule
from roll.inference import get_engine_capabilities
from roll.protocols import InferenceEngine, StateKind
from roll.rollout import Batch, LLMProxy
from roll.rollout.buffer import SampleBuffer
from roll.rollout.sharing import (
    GenerationLoad,
    OverlapState,
    StreamStart,
    compute_overlap_start,
    measure_round,
    predict_saved_s,
)
from roll.rollout.streaming import compute_part_size

__all__ = [
    "ALL_STATE_KINDS",
    "SharedDevices",
    "explain_sharing_rule",
    "list_released_engines",
    "resolve_sharing_rule",
]

logger = logging.getLogger(__name__)

Phase: TypeAlias = Literal["generation", "training"]
ALL_STATE_KINDS: tuple[StateKind, ...] = ("parameters", "optimizer")
NO_BUFFER = "the engines only evaluate"


def resolve_sharing_rule(config: RolloutRunConfig, *, accelerated: bool) -> SharingRule:
    """Return the rule of a run; `auto` is resolved as `cluster.sharing` describes.

    Args:
        config: Configuration of the run.
        accelerated: Whether the run's devices are accelerators.

    Raises:
        ConfigError: The configured engine is unknown.
    """
    rule = config.cluster.sharing
    return _choose_sharing_rule(config, accelerated=accelerated)[0] if rule == "auto" else rule


def explain_sharing_rule(config: RolloutRunConfig, *, accelerated: bool) -> str:
    """Return the rule that `cluster.sharing: auto` takes and the reason for it, as one line.

    The line is empty if the rule is given, if no engine shares devices with a trainer, and without accelerators, where
    nothing has to be released.

    Raises:
        ConfigError: The configured engine is unknown.
    """
    if config.cluster.sharing != "auto" or not config.find_shared_engines() or not accelerated:
        return ""
    rule, reason = _choose_sharing_rule(config, accelerated=accelerated)
    return f"cluster.sharing auto: {rule}, because {reason}"


def _choose_sharing_rule(config: RolloutRunConfig, *, accelerated: bool) -> tuple[SharingRule, str]:
    """Return the rule of `auto` and the reason for it."""
    num_shared, num_engines = len(config.find_shared_engines()), config.num_engines
    engine = config.inference.engine
    if not get_engine_capabilities(engine).can_sleep:
        return "disaggregated", f"engine '{engine}' cannot release its memory"
    if not accelerated:
        return "disaggregated", "nothing has to be released without accelerators"
    if not num_shared:
        return "disaggregated", "no engine shares devices with a trainer"
    if config.streams_training:
        return "disaggregated", "rollout.scheduling.stream_training trains while engines generate"
    if config.rollout.scheduling.async_ratio == 0:
        return "colocated", "the run is synchronous (rollout.scheduling.async_ratio 0)"
    if len(config.inference.widths) > 1:
        return (
            "disaggregated",
            "the run is asynchronous, and its engines have several widths (inference.tensor_parallel)",
        )
    if num_shared == num_engines:
        return "disaggregated", "every engine of this asynchronous run shares devices with a trainer"
    reason = f"the run is asynchronous, and {num_engines - num_shared} of {num_engines} engines share none"
    return "elastic_overlap", reason


def list_released_engines(config: RolloutRunConfig, rule: SharingRule) -> list[int]:
    """Return the indices of the engines that release their devices under a rule."""
    if rule == "disaggregated":
        return []
    num_engines = len(config.roles["actor_infer"].list_parts())
    return list(range(num_engines)) if rule == "colocated" else config.find_shared_engines()


class OffloadableTrainer(Protocol):
    """A trainer whose states can be moved to host memory; `TrainerGroup` implements this protocol."""

    async def offload(self, states: Sequence[StateKind]) -> None: ...

    async def onload(self, states: Sequence[StateKind]) -> None: ...


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
        policy: OffloadableTrainer,
        trainers: Sequence[OffloadableTrainer],
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
        self._proxy: LLMProxy | None = None
        self._buffer: SampleBuffer | None = None
        self._pause_pushes: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
        self._phase_began_s = self._measured_s = self._get_time_s()
        self._generation_s = 0.0
        """Seconds since `_measured_s` in which the engines generated on the devices."""
        self._switch_s = 0.0
        """Duration of the last switch to training, in seconds, and of the switch back as far as it is done."""
        self._num_finished = 0
        self._streams = False
        """True if trainers start on finished groups before their batch is complete."""
        self._stream_start = StreamStart()
        self._has_warned = False

    def attach(
        self,
        proxy: LLMProxy,
        buffer: SampleBuffer | None,
        pause_pushes: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """Set the proxy of the engines, and the buffer of the groups that the engines generate.

        Args:
            proxy: Proxy of all engines of the policy.
            buffer: Buffer of the run's groups; `None` if the engines only evaluate.
            pause_pushes: Returns a context in which no weight sync runs.
        """
        self._proxy = proxy
        self._buffer = buffer
        self._pause_pushes = pause_pushes

    @property
    def proxy(self) -> LLMProxy:
        """Proxy of all engines of the policy."""
        assert self._proxy is not None, "engines must be attached first"
        return self._proxy

    def list_kept_engines(self) -> list[InferenceEngine]:
        """Return the serving engines that do not share the devices."""
        return [engine for engine in self.proxy.serving_engines if engine.engine_id not in self.engine_ids]

    async def switch_to_training(self) -> None:
        """Release the devices of the engines, then onload the trainers for training or a checkpoint."""
        began_s = self._get_time_s()
        # In this order: trainers need the memory that engines release.
        may_stream = self.rule in ("elastic_overlap", "stream_training")
        await self.proxy.transitions.release(self.engine_ids, until_batch=may_stream)
        async with self._pause_pushes():  # the sync of a single engine offloads the policy's weights when it ends
            await asyncio.gather(*(trainer.onload(ALL_STATE_KINDS) for trainer in self._trainers))
            now_s = self._get_time_s()
            self._generation_s += began_s - self._phase_began_s
            self.phase, self._phase_began_s, self._switch_s = "training", now_s, now_s - began_s

    async def switch_to_generation(self) -> None:
        """Offload all trainer states that a weight sync does not need, then allocate the engines' memory.

        The engines generate again after a weight sync and a call of `serve`.
        """
        began_s = self._get_time_s()
        self.phase, self.is_reserved = "generation", False
        # The policy's weights stay: the weight sync that follows reads them.
        offloaded = ((each, ("optimizer",) if each is self._policy else ALL_STATE_KINDS) for each in self._trainers)
        await asyncio.gather(*(trainer.offload(states) for trainer, states in offloaded))
        await self.proxy.transitions.reacquire(self.engine_ids)
        self._switch_s += self._get_time_s() - began_s

    async def serve(self, synced: Collection[str]) -> None:
        """Let the engines generate on the devices again.

        Args:
            synced: Ids of all engines that have received the current weights.
        """
        await self.proxy.transitions.serve(self.engine_ids, synced)
        self.overlap = self.overlap.record_switch(self._switch_s)
        self._phase_began_s = self._get_time_s()

    @staticmethod
    def _get_time_s() -> float:
        return asyncio.get_running_loop().time()

    def is_stream_due(self, num_groups: int) -> bool:
        """Return whether engines should release the devices now, so that the trainer can start on finished groups."""
        if self.phase == "training" or self._buffer is None:
            return True
        if not self.list_kept_engines():  # no engine would generate the other groups
            return False
        if self.rule == "elastic_overlap":
            return num_groups >= self._count_start_groups()
        if self.rule != "stream_training":
            return False
        return self._stream_start.is_due(measure_round(self._buffer), self._measure_kept_capacity())

    def _measure_kept_capacity(self) -> int | None:
        """Return the number of tokens that fit into the KV caches of the other engines; `None` if unknown."""
        sizes = {engine.engine_id: engine.load().kv_capacity for engine in self.list_kept_engines()}
        known = [size for size in sizes.values() if size is not None]
        if len(known) == len(sizes):
            return sum(known)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "cluster.sharing stream_training releases the devices only when a batch is complete, because engine %s "
                "does not report the size of its KV cache",
                next(engine_id for engine_id, size in sizes.items() if size is None),
            )
        return None

    def _count_start_groups(self) -> int:
        """Return the number of finished groups at which `elastic_overlap` releases the devices."""
        assert self._buffer is not None, NO_BUFFER
        size = self._buffer.batch_size
        return compute_overlap_start(self.overlap.ratio, size, compute_part_size(size))

    def record_stream(self, batch: Batch, *, wait_s: float, step_s: float) -> None:
        """Record a batch that could be trained on before it was complete; see `ServedPolicy.record_stream`."""
        self._streams = True
        self._stream_start.end_round(len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts)
        self.overlap = self.overlap.record_step(wait_s=wait_s, step_s=step_s)

    def should_return(self) -> bool:
        """Return whether the engines generate on the devices after this weight sync; otherwise, reserve the devices."""
        if self.phase == "generation":
            return False
        if self.rule != "elastic_overlap" or self._buffer is None:
            return True
        kept, num_shared = self.list_kept_engines(), len(self.engine_ids)
        self._record_generation(len(kept))
        overlap, load = self.overlap, self._measure_load(kept)
        until_release = None
        if self._streams:
            until_release = self._count_start_groups() - len(self._buffer.list_certain_ready())
        wait_s = overlap.predict_wait_s(self._buffer.num_missing, self._measure_age_s(), until_release)
        saved_s = predict_saved_s(wait_s, overlap.mean_engines, len(kept), num_shared, load)
        self.is_reserved = not overlap.should_generate(saved_s, self._switch_s)
        return not self.is_reserved

    def _record_generation(self, num_kept: int) -> None:
        """Record the groups that have finished since the last call, and the batch that was trained on."""
        assert self._buffer is not None, NO_BUFFER
        now_s, num_finished = self._get_time_s(), self._buffer.num_finished
        seconds = now_s - self._measured_s
        engine_s = num_kept * seconds + len(self.engine_ids) * self._generation_s
        self.overlap = self.overlap.record_generation(num_finished - self._num_finished, seconds, engine_s)
        self._num_finished, self._measured_s, self._generation_s = num_finished, now_s, 0.0
        taken = [live.run for live in self._buffer if live.is_taken]
        began_s = [run.began_s for run in taken if run.began_s is not None]
        ended_s = [run.ended_s for run in taken if run.ended_s is not None]
        if began_s and ended_s:
            self.overlap = self.overlap.record_span(max(ended_s) - min(began_s))

    def _measure_age_s(self) -> float | None:
        """Return the seconds since the start of the first running group that the next batch needs; `None` if it needs
        no particular running group."""
        assert self._buffer is not None, NO_BUFFER
        due = self._buffer.list_due_groups(self._buffer.version + 1)
        began_s = [live.run.began_s for live in due if live.run.began_s is not None]
        return self._get_time_s() - min(began_s) if began_s else None

    def _measure_load(self, kept: Sequence[InferenceEngine]) -> GenerationLoad:
        """Return the load of the kept engines during the next step.

        The next step launches as many groups as the last batch had. They are assumed to have as many requests per
        rollout as the rollouts in flight.
        """
        assert self._buffer is not None, NO_BUFFER
        num_running = sum(len(live.run.tasks) for live in self._buffer.running_groups)
        num_launched = sum(live.run.num_launched for live in self._buffer if live.is_taken)
        num_requests = self.proxy.num_running + self.proxy.num_waiting
        share = min(1.0, num_requests / num_running) if num_running else 1.0
        return GenerationLoad(
            num_requests=share * (num_running + num_launched),
            engine_share=share,
            num_slots=sum(max(1, engine.load().capacity) for engine in kept) / max(1, len(kept)),
            curve=self.proxy.fleet_curve,
        )

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
