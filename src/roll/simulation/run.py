"""Simulate one run: the training loop and the scheduling of real runs, with simulated engines, rewards and trainer.

prompts ─► AsyncController ─► RolloutScheduler ─► LLMProxy ─► SimulatedEngine × N      (roll.rollout, unchanged)
             │                    └─► SimulatedReward
             └─ next_batch ─► learn (sleeps) ─► weight sync ─► complete_step ─► …      (roll.pipelines.online.loop)
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.pipelines.colocation import SharedDevices
from roll.pipelines.online.loop import train
from roll.pipelines.state import RunState
from roll.rollout.attempts import SamplingPlan
from roll.rollout.batch import BatchSpec
from roll.rollout.controller import AsyncController
from roll.rollout.device_classes import DeviceClasses
from roll.rollout.engine_widths import EngineWidths
from roll.rollout.proxy import LLMProxy
from roll.rollout.routing import Router
from roll.rollout.scheduler import RolloutScheduler
from roll.simulation import clock
from roll.simulation.batch import BatchLimits
from roll.simulation.costs import EngineCosts, compute_engine_costs, compute_kv_capacity, compute_sync_s
from roll.simulation.engine import EngineSettings
from roll.simulation.hardware import Device, Model, load_device, load_model_sizes
from roll.simulation.recorded import RecordedWorkload, build_recorded_loop, build_workload
from roll.simulation.recorder import Recorder, StepRecord
from roll.simulation.roles import (
    SimulatedEngines,
    SimulatedRenderer,
    SimulatedReward,
    SimulatedTrainer,
    build_turns,
)
from roll.simulation.steps import SimulatedPolicyEngines, SimulatedSteps, find_rejection_reason
from roll.simulation.workload import Workload
from roll.types import TRAIN, SamplingParams

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
    """Wall time of the simulation."""
    recorder: Recorder

    @property
    def step_s(self) -> float:
        """Mean duration of a step, without warm-up steps."""
        return sum(step.total_s for step in self.steps) / len(self.steps)


def build_engine_settings(
    config: SimulationConfig, model: Model, device: Device, width: int | None = None
) -> EngineSettings:
    """Return the settings of each engine of a simulation: step costs, limits, and times of weight syncs.

    Args:
        config: The simulation.
        model: The model.
        device: Device of the engines.
        width: Number of devices of each engine; by default the first width of the configuration.

    Raises:
        ConfigError: The model does not fit, or leaves no room for the KV cache.
    """
    engine = config.engine
    width = width or engine.width
    capacity = engine.kv_capacity
    if capacity is None:
        capacity = compute_kv_capacity(model, device, width, engine.memory_share)
        if capacity < 1:
            raise ConfigError(
                f"{model.name} ({model.weight_bytes / 1e9:.0f} GB) does not fit on {width} x "
                f"{device.name} ({device.memory_bytes / 1e9:.0f} GB each, of which {engine.memory_share:.0%} is used): "
                "raise engine.tensor_parallel."
            )
    costs = compute_engine_costs(model, device, width)
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


async def _run_simulation(config: SimulationConfig, seed: int, recorder: Recorder) -> int:
    """Run all steps, and return the number of callbacks of the event loop."""
    model = load_model_sizes(config.model)
    by_device = {name: build_engine_settings(config, model, load_device(name)) for name in set(config.engine_devices)}
    settings = [by_device[name] for name in config.engine_devices]
    widths = [config.engine.width] * len(settings)
    for width in config.engine.widths[1:]:  # these engines use the same devices, in turns
        count = config.placement.generation // width
        settings += [build_engine_settings(config, model, load_device(config.device), width)] * count
        widths += [width] * count
    _check_kv_capacity(config, min(each.limits.kv_capacity for each in settings))
    workload, state = build_workload(config, seed), RunState()
    if isinstance(workload, RecordedWorkload):
        _check_recorded_training(config, workload)
        if config.training.sync_s is None:
            settings = [replace(each, update_s=workload.sync_s) for each in settings]
    engines = SimulatedEngines(settings, workload.count_answer_tokens, widths)
    controller, proxy = _build_controller(config, seed, workload, engines, recorder, state)
    engine_widths = _build_engine_widths(config, proxy, engines)
    if engine_widths is not None:
        controller.round_listener = engine_widths
        await engine_widths.start()
    trainer = SimulatedTrainer(config, model, load_device(config.training_device), workload)
    devices = _build_shared_devices(config, proxy, controller, trainer)
    steps = SimulatedSteps(
        config=config,
        controller=controller,
        engines=engines,
        policy_engines=SimulatedPolicyEngines(engines, proxy, controller, recorder, state, devices),
        trainer=trainer,
        recorder=recorder,
        state=state,
        widths=engine_widths,
    )
    engines.schedule_failures(config.failures)
    try:
        await train(steps, steps)
    finally:
        await proxy.close()
        await engines.close()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, clock.VirtualTimeLoop), "a simulated run needs virtual time"
    return loop.num_callbacks


def _build_engine_widths(config: SimulationConfig, proxy: LLMProxy, engines: SimulatedEngines) -> EngineWidths | None:
    """Return the switch between engines of several widths; `None` if all engines have the same width."""
    if len(config.engine.widths) == 1:
        return None
    return EngineWidths(proxy, engines.list_ids_by_width(), num_requests=config.rollout.count_running_rollouts())


def _build_shared_devices(
    config: SimulationConfig, proxy: LLMProxy, controller: AsyncController, trainer: SimulatedTrainer
) -> SharedDevices | None:
    """Return the devices that engines and trainer share; `None` if switching is free and no sharing rule is set."""
    place = config.placement
    if not place.shares_devices or (place.sharing is None and not place.switch_s):
        return None
    names = [engine.engine_id for engine in proxy.engines]
    released = names[-config.num_released_engines :] if place.overlaps else names
    devices = SharedDevices(trainer, [trainer], released, place.rule)
    devices.attach(proxy, controller.buffer)
    return devices


def _build_controller(
    config: SimulationConfig,
    seed: int,
    workload: Workload,
    engines: SimulatedEngines,
    recorder: Recorder,
    state: RunState,
) -> tuple[AsyncController, LLMProxy]:
    """Build the scheduler of a run with its controller and its proxy."""
    rollout, scheduling = config.rollout, config.rollout.scheduling
    filters_groups = config.reward.filter_groups
    proxy = LLMProxy(
        engines,
        lambda engine: engines.send_weights(engine, state.policy_version),
        max_attempts=rollout.max_attempts,
        router=Router(scheduling.routing_policy, scheduling.max_kv_used, _build_device_classes(config)),
    )
    reward = SimulatedReward(workload, config.reward.num_workers)
    scheduler = RolloutScheduler(
        proxy,
        dict.fromkeys(workload.domains, reward),
        SimulatedRenderer(),
        seed=seed,
        max_attempts=rollout.max_attempts,
        replicate=scheduling.replicate_prompts and scheduling.type != "batch",
        loop=build_turns(config, workload) or build_recorded_loop(workload),
    )
    scheduler.lifecycle.add_listener(recorder.on_transition)
    numbers = itertools.count()
    plan = SamplingPlan(
        purpose=TRAIN,
        group_size=rollout.group_size,
        sampling=SamplingParams(max_new_tokens=rollout.max_new_tokens),
    )
    spec = BatchSpec(
        draw=lambda count, domain: [workload.draw(next(numbers)) for _ in range(count)],
        plans=(plan,),
        batch_size=rollout.prompts_per_step,
        get_rejection_reason=find_rejection_reason if filters_groups else None,
        max_refills=config.reward.max_refills if filters_groups else 0,
    )
    return AsyncController(scheduler, proxy, scheduling, spec), proxy


def _build_device_classes(config: SimulationConfig) -> DeviceClasses | None:
    """Return the device classes of the engines and the preferences of the domains; `None` without device classes."""
    if not config.device_classes:
        return None
    width = config.engine.width
    return DeviceClasses(
        engine_classes={f"engine-{index}": name for index, name in enumerate(config.engine_classes)},
        engine_prices={name: width * (each.price_per_hour or 1.0) for name, each in config.device_classes.items()},
        preferences=config.preferred_classes,
    )


def _check_recorded_training(config: SimulationConfig, workload: RecordedWorkload) -> None:
    if workload.work.train_s and config.rollout.scheduling.stream_training:
        raise ConfigError(
            "rollout.scheduling.stream_training requires a training time that depends on the number of tokens, but "
            "the recorded run has only the times of whole steps: simulate a workload with answer_tokens."
        )


def _check_kv_capacity(config: SimulationConfig, capacity: int) -> None:
    if config.rollout.max_new_tokens >= capacity:
        raise ConfigError(
            f"rollout.max_new_tokens {config.rollout.max_new_tokens} does not fit into an engine's KV cache of "
            f"{capacity:,} tokens: raise engine.tensor_parallel, or lower max_new_tokens."
        )
