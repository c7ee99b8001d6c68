"""`roll plan` for a run without generation: plan only the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.distributions import compute_mean
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.preflight.report import align_rows
from roll.simulation.costs import compute_train_s
from roll.simulation.experts import choose_expert_parallel, compute_expert_traffic_s
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.memory import MAX_TRAINER_MEMORY_FRACTION, estimate_trainer_bytes
from roll.simulation.plan_report import render_constants, render_experts
from roll.simulation.plan_sources import PlanSource

__all__ = ["render_training_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainerEstimate:
    """Estimated step time and memory of a trainer with `ranks` ranks."""

    ranks: int
    ep: int
    step_s: float
    memory: dict[str, int]
    fits: bool


def render_training_plan(source: PlanSource) -> str:
    """Plan a supervised run, and return the plan as text: step time and memory for each number of ranks.

    Raises:
        ConfigError: The model does not fit with any number of ranks up to the number of devices.
    """
    config = source.config
    model, device = load_model_sizes(config.model), load_device(config.device)
    tried = [_estimate_trainer(source, count) for count in _list_rank_counts(config.placement.num_devices)]
    fitting = [trainer for trainer in tried if trainer.fits]
    if not fitting:
        least = tried[-1]
        raise ConfigError(
            f"no plan for {model.name} fits {config.placement.num_devices} x {device.name}: a rank requires at least "
            f"{sum(least.memory.values()) / 1e9:.1f} GB, but a device has {device.memory_bytes / 1e9:.0f} GB. Use "
            "more or larger devices (--devices, --device), model.lora, or training.activation_checkpointing."
        )
    best = min(fitting, key=lambda trainer: trainer.step_s)
    rows = [("ranks", "step", "memory of a rank", "ep", "")]
    for trainer in tried:
        size = f"{sum(trainer.memory.values()) / 1e9:.1f} GB"
        note = "" if trainer.fits else "does not fit"
        rows.append((str(trainer.ranks), f"{trainer.step_s:.4g} s", size, str(trainer.ep), note))
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in best.memory.items() if size)
    experts = choose_expert_parallel(_replace_ranks(config, best.ranks), model, device, source.trainer)
    return "\n".join(
        [
            f"{config.name}: {config.model} on {config.placement.num_devices} x {config.device}, "
            f"{source.examples_per_step} examples a step; no engines",
            "",
            f"Plan: {best.ranks} trainer rank{'s' * (best.ranks > 1)}",
            f"  a step takes {best.step_s:.4g} s; a rank requires {sum(best.memory.values()) / 1e9:.1f} GB ({parts})",
            *render_experts(experts),
            "",
            "Tried",
            *(f"  {line}" for line in align_rows(rows)),
            "",
            *render_constants(source.constants),
        ]
    )


def _list_rank_counts(max_ranks: int) -> list[int]:
    return sorted({min(2**power, max_ranks) for power in range(max_ranks.bit_length() + 1)})


def _replace_ranks(config: SimulationConfig, ranks: int) -> SimulationConfig:
    return config.with_changes({"placement.generation": ranks, "placement.training": 0})


def _estimate_trainer(source: PlanSource, ranks: int) -> _TrainerEstimate:
    config = _replace_ranks(source.config, ranks)
    model, device = load_model_sizes(config.model), load_device(config.device)
    length = compute_mean(config.answer_tokens)
    experts = choose_expert_parallel(config, model, device, source.trainer)
    ep = experts[0].size if experts else 1
    max_length = config.rollout.max_new_tokens
    memory = estimate_trainer_bytes(model, device, ranks=ranks, max_length=max_length, ep=ep, trainer=source.trainer)
    total = config.rollouts_per_step * length
    seconds = compute_train_s(model, device, ranks, round(total), length, passes=config.training.passes)
    if experts:
        traffic_s = compute_expert_traffic_s(
            model,
            device,
            ranks=ranks,
            ep=ep,
            tokens_per_rank=total / ranks,
            micro_batches=max(1, math.ceil(total / ranks / max_length)),
        )
        seconds = max(seconds, traffic_s)
    fits = sum(memory.values()) <= MAX_TRAINER_MEMORY_FRACTION * device.memory_bytes
    return _TrainerEstimate(ranks=ranks, ep=ep, step_s=config.training.overhead_s + seconds, memory=memory, fits=fits)
