"""Simulate one run: the real scheduler, controller and proxy, with simulated engines, rewards and trainer.

prompts ─► AsyncController ─► RolloutScheduler ─► LLMProxy ─► SimulatedEngine × N      (roll.rollout, unchanged)
             │                    └─► SimulatedReward
             └─ next_batch ─► train (sleeps) ─► pause_for_update(): sync ─► complete_step ─► …
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.rollout.attempts import SamplingPlan
from roll.rollout.batch import Batch, BatchSpec
from roll.rollout.controller import AsyncController
from roll.rollout.proxy import LLMProxy
from roll.rollout.routing import Router
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.streaming import collect_batch
from roll.simulation import clock
from roll.simulation.batch import BatchLimits
from roll.simulation.costs import EngineCosts, compute_engine_costs, compute_kv_capacity, compute_sync_s
from roll.simulation.engine import EngineSettings
from roll.simulation.hardware import Device, Model, load_device, load_model_sizes
from roll.simulation.recorded import RecordedWorkload, build_recorded_loop, build_workload
from roll.simulation.recorder import Recorder, StepRecord
from roll.simulation.roles import (
    EnvironmentTurns,
    SimulatedEngines,
    SimulatedRenderer,
    SimulatedReward,
    SimulatedTrainer,
)
from roll.simulation.workload import DOMAIN
from roll.types import TRAIN, Group, PromptDraw, SamplingParams

__all__ = ["SimulatedRun", "build_engine_settings", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """The results of one simulated run."""

    seed: int
    steps: tuple[StepRecord, ...]
    """Records of steps after the warm-up."""
    digest: str
    """Hash of all events; identical runs have the same hash."""
    num_transitions: int
    num_callbacks: int
    wall_s: float
    """Real duration of the simulation."""
    recorder: Recorder

    @property
    def step_s(self) -> float:
        """Mean duration of a step, without warm-up steps."""
        return sum(step.total_s for step in self.steps) / len(self.steps)


def build_engine_settings(config: SimulationConfig, model: Model, device: Device) -> EngineSettings:
    """Return the settings of each engine of a simulation: step costs, limits, and times of weight syncs.

    Raises:
        ConfigError: The model does not fit, or leaves no room for the KV cache.
    """
    engine = config.engine
    capacity = engine.kv_capacity
    if capacity is None:
        capacity = compute_kv_capacity(model, device, engine.tensor_parallel, engine.memory_share)
        if capacity < 1:
            raise ConfigError(
                f"{model.name} ({model.weight_bytes / 1e9:.0f} GB) does not fit on {engine.tensor_parallel} x "
                f"{device.name} ({device.memory_bytes / 1e9:.0f} GB each, of which {engine.memory_share:.0%} is used): "
                "raise engine.tensor_parallel."
            )
    costs = compute_engine_costs(model, device, engine.tensor_parallel)
    if engine.step_s is not None:
        costs = EngineCosts(overhead_s=engine.step_s)
    given = config.training.sync_s
    return EngineSettings(
        costs=costs,
        limits=BatchLimits(
            max_num_seqs=engine.max_num_seqs, max_batched_tokens=engine.max_batched_tokens, kv_capacity=capacity
        ),
        update_s=_compute_update_s(config, model, device) if given is None else given,
        recompute_on_update=engine.recompute_on_update,
        prefix_block=engine.prefix_block or 0,
        start_s=engine.restart_s,
    )


def _compute_update_s(config: SimulationConfig, model: Model, device: Device) -> float:
    quantized = config.training.quantization != "none"
    return compute_sync_s(model, device, colocated=config.placement.is_colocated, quantized=quantized)


def simulate(config: SimulationConfig, *, seed: int | None = None, trace: bool = False) -> SimulatedRun:
    """Simulate `config`, without its variants, in virtual time.

    Args:
        config: The workload and its policies.
        seed: Replaces the configuration's seed.
        trace: Whether to keep events for a trace file.

    Raises:
        UserError: The hardware or model is unknown, or the model does not fit.
        DeadlockError: The scheduler waits for an event that can never happen. A note contains the seed.
    """
    seed = config.seed if seed is None else seed
    recorder = Recorder(trace=trace)
    began = time.perf_counter()
    with _collect_garbage_rarely():
        num_callbacks = clock.run(_run_simulation(config, seed, recorder), seed=seed)
    return SimulatedRun(
        seed=seed,
        steps=tuple(recorder.steps[config.warmup_steps :]),
        digest=recorder.digest,
        num_transitions=recorder.num_transitions,
        num_callbacks=num_callbacks,
        wall_s=time.perf_counter() - began,
        recorder=recorder,
    )


@contextmanager
def _collect_garbage_rarely() -> Iterator[None]:
    """Collect garbage rarely within a `with` block.

    Tens of thousands of tasks live for a whole step, so frequent collection would free nothing.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _RunObjects:
    """The scheduler, engines, trainer and workload of one simulated run."""

    def __init__(self, config: SimulationConfig, seed: int, recorder: Recorder) -> None:
        model, device = load_model_sizes(config.model), load_device(config.device)
        settings = build_engine_settings(config, model, device)
        _check_kv_capacity(config, settings.limits.kv_capacity)
        scheduling = config.rollout.scheduling
        self.config = config
        self.recorder = recorder
        self.workload = build_workload(config, seed)
        if isinstance(self.workload, RecordedWorkload) and config.training.sync_s is None:
            settings = replace(settings, update_s=self.workload.sync_s)
        if isinstance(self.workload, RecordedWorkload) and self.workload.work.train_s and scheduling.stream_training:
            raise ConfigError(
                "rollout.scheduling.stream_training needs a training time that depends on the number of tokens, but "
                "the recorded run has the times of whole steps: simulate a workload with answer_tokens."
            )
        self.engines = SimulatedEngines(config.num_engines, settings, self.workload.count_answer_tokens)
        self.trainer = SimulatedTrainer(config, model, device, self.workload)
        self.further_overhead_s = (config.training.num_updates - 1) * config.training.overhead_s
        """Overhead of a step's updates after the first one, if their duration is computed."""
        self.version = 0
        self.num_drawn = 0
        self.proxy = LLMProxy(
            self.engines,
            lambda engine: self.engines.send_weights(engine, self.version),
            max_attempts=config.rollout.max_attempts,
            router=Router(
                "round_robin" if scheduling.type == "batch" else "least_loaded", max_kv_used=scheduling.max_kv_used
            ),
        )
        environment = config.environment
        self.scheduler = RolloutScheduler(
            self.proxy,
            {DOMAIN: SimulatedReward(self.workload, config.reward.num_workers)},
            SimulatedRenderer(),
            seed=seed,
            max_attempts=config.rollout.max_attempts,
            replicate=scheduling.replicate_prompts and scheduling.type != "batch",
            loop=EnvironmentTurns(environment, self.workload) if environment else build_recorded_loop(self.workload),
        )
        self.scheduler.lifecycle.add_listener(recorder.on_transition)
        self.controller = AsyncController(
            self.scheduler,
            self.proxy,
            scheduling,
            BatchSpec(
                draw=self._draw_prompts,
                plans=(self._build_sampling_plan(),),
                batch_size=config.rollout.prompts_per_step,
                get_rejection_reason=_find_rejection_reason if config.reward.filter_groups else None,
                max_refills=config.reward.max_refills if config.reward.filter_groups else 0,
            ),
        )

    def _draw_prompts(self, count: int, domain: str | None) -> Sequence[PromptDraw]:
        first, self.num_drawn = self.num_drawn, self.num_drawn + count
        return [self.workload.draw(draw_id) for draw_id in range(first, first + count)]

    def list_lengths(self, groups: Iterable[Group]) -> list[int]:
        """Return the number of tokens of each rollout that the trainer computes."""
        shared = self.config.training.share_prefix
        return [
            len(rollout.token_ids) + (len(group.draw.token_ids) if not index or not shared else 0)
            for group in groups
            for index, rollout in enumerate(group.scored_rollouts)
        ]

    def _build_sampling_plan(self) -> SamplingPlan:
        rollout = self.config.rollout
        return SamplingPlan(
            purpose=TRAIN,
            group_size=rollout.group_size,
            sampling=SamplingParams(max_new_tokens=rollout.max_new_tokens),
        )


def _check_kv_capacity(config: SimulationConfig, capacity: int) -> None:
    if config.rollout.max_new_tokens >= capacity:
        raise ConfigError(
            f"rollout.max_new_tokens {config.rollout.max_new_tokens} does not fit into an engine's KV cache of "
            f"{capacity:,} tokens: raise engine.tensor_parallel, or lower max_new_tokens."
        )


def _find_rejection_reason(group: Group) -> str:
    """Return why dynamic sampling rejects a group (all rewards are equal); an empty string if the group is accepted."""
    values = {rollout.reward.value for rollout in group.scored_rollouts if rollout.reward is not None}
    return "all rewards are equal" if len(values) < 2 else ""


async def _run_simulation(config: SimulationConfig, seed: int, recorder: Recorder) -> int:
    objects = _RunObjects(config, seed, recorder)
    objects.engines.schedule_failures(config.failures)
    try:
        for step in range(1, config.num_steps + 1):
            await _run_step(objects, step)
        await objects.controller.close()
    finally:
        await objects.proxy.close()
        await objects.engines.close()
    return _get_loop().num_callbacks


async def _run_step(objects: _RunObjects, step: int) -> None:
    """Run one step of the `rlvr` pipeline's loop, with simulated time instead of computation."""
    loop, recorder = _get_loop(), objects.recorder
    before, moments = objects.engines.sum_totals(), [loop.time()]
    streamed: set[int] = set()
    with recorder.phase("wait for batch"):
        batch = await _collect_batch(objects, step, streamed)
    moments.append(loop.time())
    trained = [group for group in batch.groups if group.draw.draw_id not in batch.rejection_reasons]
    lengths = objects.list_lengths(group for group in trained if group.draw.draw_id not in streamed)
    with recorder.phase("train"):
        await asyncio.sleep(objects.trainer.compute_duration_s(step, lengths) + objects.further_overhead_s)
    moments.append(loop.time())
    objects.version += 1
    with recorder.phase("sync"):
        await objects.proxy.wait_for_replacements()
        async with objects.controller.pause_for_update():
            dead = await objects.engines.sync(objects.version)
        objects.proxy.start_replacing(dead)
        await objects.proxy.wait_for_replacements()
    moments.append(loop.time())
    await objects.controller.complete_step(objects.version, {r.rollout_id for g in trained for r in g.scored_rollouts})
    recorder.add_step(_build_record(objects, step, batch, trained, before, moments), moments[0])


async def _collect_batch(objects: _RunObjects, step: int, streamed: set[int]) -> Batch:
    """Wait for a batch; with `stream_training`, train finished groups meanwhile, and add their draws to `streamed`."""
    config = objects.config
    if not config.rollout.scheduling.stream_training:
        return await objects.controller.next_batch()

    async def train(groups: Sequence[Group]) -> None:
        accepted = [group for group in groups if not config.reward.filter_groups or not _find_rejection_reason(group)]
        streamed.update(group.draw.draw_id for group in accepted)
        seconds = objects.trainer.compute_duration_s(step, objects.list_lengths(accepted))
        await asyncio.sleep(max(0.0, seconds - config.training.overhead_s))

    return await collect_batch(objects.controller, config.rollout.prompts_per_step, train)


def _build_record(
    objects: _RunObjects, step: int, batch: Batch, trained: Sequence[Group], before: Any, moments: Sequence[float]
) -> StepRecord:
    began, ready, updated, ended = moments
    after, total, parts = objects.engines.sum_totals(), ended - began, objects.config.training.num_updates
    answers = [len(rollout.token_ids) for group in trained for rollout in group.scored_rollouts]
    return StepRecord(
        step=step,
        kind=batch.kind,
        total_s=total / parts,
        wait_s=(ready - began) / parts,
        train_s=(updated - ready) / parts,
        sync_s=(ended - updated) / parts,
        num_samples=len(answers) // parts,
        num_tokens=sum(answers) // parts,
        longest=max(answers, default=0),
        max_staleness=max(batch.staleness, default=0) + parts - 1,
        num_expired=len(batch.expired),
        busy_share=(after.busy_s - before.busy_s) / (total * objects.config.num_engines) if total else 0.0,
        tokens_per_s=(after.num_generated - before.num_generated) / total if total else 0.0,
        num_preempted=after.num_preempted - before.num_preempted,
        num_filtered=len(batch.rejection_reasons),
    )


def _get_loop() -> clock.VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, clock.VirtualTimeLoop), "a simulated run needs virtual time"
    return loop
