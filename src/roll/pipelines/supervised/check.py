"""Checks of a run that learns from examples before it starts; they take seconds.

configuration ──► machine, model's sizes, examples ──► steps, memory, disk, a step's time on few layers ──► report
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from roll.config.activation_memory import estimate_logit_bytes, get_element_bytes
from roll.config.estimate import (
    RoleMemory,
    add_host_memory,
    estimate_disk_use,
    estimate_engine_bytes,
    estimate_frozen_bytes,
    estimate_heap_bytes,
    estimate_kernel_bytes,
    estimate_training_bytes,
)
from roll.config.supervised import SupervisedConfig
from roll.config.training import should_trim_heap
from roll.data.examples import ExampleKind
from roll.data.media_text import count_media_tokens
from roll.inference import resolve_engine_kind
from roll.models import describe_model, find_model
from roll.pipelines.preparation import prepare as prepare_prompts
from roll.pipelines.quantization import describe_answer_quantization
from roll.pipelines.supervised.preparation import PreparedRun, build_policy_spec, prepare
from roll.preflight.inspection import check_backend_and_placement, check_disk, check_memory, inspect_policy, run_checks
from roll.preflight.layout import check_layout
from roll.preflight.machine import inspect_machine
from roll.preflight.report import Report
from roll.preflight.timing import can_measure_step_time, measure_step_time
from roll.training import Role
from roll.training.packing.blocks import Block
from roll.training.packing.micro_batches import pack
from roll.types import TrainingBatch, TrainingSample

__all__ = ["FrozenModelCost", "inspect"]

NUM_SAMPLED_STEPS = 8
"""Number of initial steps whose examples are used to estimate the step time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModelCost:
    """Cost of models other than the trained one."""

    paths: tuple[str, ...] = ()
    """Paths of models that the trainer loads in addition."""
    kept_token_bytes: int = 0
    """Bytes stored on disk per trained token."""
    passes_before: float = 0.0
    """Forward passes over every example before the first step, in units of the trained model's forward pass."""
    passes_per_step: int = 0
    """Forward passes over a step's batch in addition to the update."""


NO_OTHER_MODELS = FrozenModelCost()


def inspect(
    config: SupervisedConfig,
    *,
    kind: ExampleKind,
    method: str,
    loss: str,
    other_models: FrozenModelCost = NO_OTHER_MODELS,
    role: Role = "policy",
) -> Report:
    """Check a run that trains on examples before it starts, and return the report.

    Args:
        config: Configuration of the run.
        kind: Type of the run's examples.
        method: Name of the method.
        loss: Import path of the loss.
        other_models: Cost of models other than the trained one.
        role: Role of the trained model; a reward model scores sequences at their ends.
    """
    return run_checks(
        Report(config=config, method=method, machine=inspect_machine()),
        config,
        check_backend_and_placement,
        _check_model,
        check_layout,
        partial(_check_examples, kind=kind, loss=loss, other_models=other_models, role=role),
        check_disk,
    )


def _check_model(report: Report, config: SupervisedConfig) -> None:
    report.model = inspect_policy(report, config.model)


def _check_examples(
    report: Report, config: SupervisedConfig, kind: ExampleKind, loss: str, other_models: FrozenModelCost, role: Role
) -> None:
    if report.model is None:
        return
    if find_model(config.model.path) is None:  # without a tokenizer, assume full micro-batches, the upper bound
        if not other_models.paths:
            _estimate_memory(report, config, config.training.max_tokens_per_micro_batch, 1, 0, other_models, role)
        return
    prepared = prepare(config, kind, score_at_end=role == "reward_model")
    examples, training = prepared.examples, prepared.training
    report.num_held_out = len(examples.held_out)
    if not report.num_held_out:
        report.notes.append("no source has held-out examples, so the run is not evaluated.")
    steps = _take_first_steps(prepared)
    packed = [_count_tokens(config, batch) for batch in steps]
    per_step = round(fmean(packed))
    micro = min(max(packed), training.max_tokens_per_micro_batch)
    epochs = training.num_steps * training.examples_per_step / examples.train.num_items
    report.batch += [
        f"{examples.train.num_items:,} examples to train on, {training.examples_per_step} per step: "
        f"{training.num_steps:,} steps, {epochs:.2g} epochs",
        f"about {per_step:,} tokens per step, {fmean(b.num_loss_tokens for b in steps):,.0f} of them trained: "
        f"micro-batches of up to {micro:,} tokens",
        f"{report.num_held_out:,} examples held out",
    ]
    media = max(_count_media(config, prepared, batch) for batch in steps)
    _estimate_memory(report, config, micro, math.ceil(per_step / micro), media, other_models, role)
    num_loss_tokens = fmean(b.num_loss_tokens / b.num_units for b in steps) * (
        examples.train.num_items + report.num_held_out
    )
    report.disk = estimate_disk_use(
        config,
        training,
        report.model,
        training.num_steps,
        stored_bytes=round(num_loss_tokens * other_models.kept_token_bytes),
    )
    _estimate_time(report, config, prepared, steps, loss, other_models, role)


def _take_first_steps(prepared: PreparedRun) -> list[TrainingBatch]:
    """Sample the batches of the run's first steps from the stream, and return the non-empty batches."""
    stream, count = prepared.examples.train, prepared.training.examples_per_step
    steps = (map(prepared.examples.build_samples, stream.draw(count)) for _ in range(NUM_SAMPLED_STEPS))
    batches = [tuple(s for found in step if not isinstance(found, str) for s in found) for step in steps]
    return [TrainingBatch(samples=samples) for samples in batches if samples]


def _count_tokens(config: SupervisedConfig, batch: TrainingBatch) -> int:
    """Return the number of tokens that the busiest rank processes in a step."""
    return max(
        sum(block.num_tokens for micro in rank for block in micro) for rank in _pack_micro_batches(config, batch)
    )


def _count_media(config: SupervisedConfig, prepared: PreparedRun, batch: TrainingBatch) -> int:
    """Return the maximum number of feature tokens per micro-batch; repeated media are counted once."""
    inputs = prepared.examples.sample_builder.renderer.media_inputs
    if inputs is None or not any(sample.media for sample in batch.samples):
        return 0
    return max(
        count_media_tokens((span for block in micro for own in block.members for span in own.sample.media), inputs)
        for rank in _pack_micro_batches(config, batch)
        for micro in rank
    )


def _pack_micro_batches(config: SupervisedConfig, batch: TrainingBatch) -> Sequence[Sequence[Sequence[Block]]]:
    """Return the blocks of each micro-batch of each rank."""
    training = config.training
    return pack(
        batch.samples,
        max_tokens=training.max_tokens_per_micro_batch,
        share_prefix=training.share_prefix,
        num_ranks=config.roles["actor_train"].count // training.parallel.ranks_per_batch_shard,
    )


def _estimate_memory(
    report: Report,
    config: SupervisedConfig,
    micro_batch_tokens: int,
    micro_batches: int,
    media_tokens: int,
    other_models: FrozenModelCost,
    role: Role,
) -> None:
    """Estimate the memory of a step with `micro_batches` micro-batches of up to `micro_batch_tokens` tokens each.

    The images of each micro-batch have up to `media_tokens` feature tokens.
    """
    sizes, ranks, element = report.model, config.roles["actor_train"].count, get_element_bytes(config.model.dtype)
    assert sizes is not None
    parallel = config.training.parallel
    own = micro_batch_tokens // parallel.ranks_per_micro_batch
    on_accelerator = report.machine.has_accelerators
    parts = estimate_training_bytes(
        config.model,
        config.training,
        sizes,
        micro_batch_tokens,
        ranks,
        micro_batches=micro_batches,
        on_accelerator=on_accelerator,
        media_tokens=media_tokens,
    )
    in_run = config.training.num_steps * micro_batches
    parts |= estimate_kernel_bytes(config.model, config.training, sizes, in_run, on_accelerator=on_accelerator)
    if role == "policy":
        parts["logits"] = estimate_logit_bytes(sizes, own, element, layer_bytes=parts.get("a layer", 0)) * (
            2 if other_models.paths else 1
        )
    if other_models.paths:
        parts["teachers"] = sum(
            estimate_frozen_bytes(describe_model(path), parallel, ranks, element) for path in other_models.paths
        )
    if not on_accelerator:
        parts |= estimate_heap_bytes(parts, trimmed=should_trim_heap(config.model, config.training, ranks))
    report.memory = [RoleMemory(role="actor_train", count=ranks, parts=parts), *_estimate_engine_memory(report, config)]
    if not on_accelerator:
        report.memory = add_host_memory(report.memory, config, reads_images=sizes.tower is not None)
    check_memory(report)


def _estimate_engine_memory(report: Report, config: SupervisedConfig) -> list[RoleMemory]:
    """Estimate the memory of the engines of `evaluation.answers`."""
    answering, sizes = config.build_prompt_run_config(), report.model
    if answering is None or sizes is None:
        return []
    report.notes += describe_answer_quantization(answering)
    if find_model(config.model.path) is None:
        report.notes.append(
            "the memory of the engines for evaluation.answers is unknown until the tokenizer is on this machine."
        )
        return []
    evaluation, count = answering.evaluation, answering.num_engines
    report.engine_kind = resolve_engine_kind(answering.inference.engine)
    parts = estimate_engine_bytes(
        answering.inference,
        sizes,
        width=answering.inference.width,
        num_requests=math.ceil(evaluation.num_prompts * evaluation.samples_per_prompt / count),
        kind=report.engine_kind,
        max_context=prepare_prompts(answering).max_context,
        element_bytes=get_element_bytes(config.model.dtype),
        on_accelerator=report.machine.has_accelerators,
    )
    return [RoleMemory(role="actor_infer", count=count, parts=parts)]


def _estimate_time(
    report: Report,
    config: SupervisedConfig,
    prepared: PreparedRun,
    steps: list[TrainingBatch],
    loss: str,
    other_models: FrozenModelCost,
    role: Role,
) -> None:
    sizes, ranks = report.model, config.roles["actor_train"].count
    assert sizes is not None
    if ranks > 1 or not can_measure_step_time(sizes):
        report.notes.append("the time of a step is not estimated, because the estimate needs the devices of the run.")
        return
    usual = min(
        steps, key=lambda batch: abs(_count_tokens(config, batch) - fmean(_count_tokens(config, b) for b in steps))
    )
    probe = _take_first_units(usual, 2 * prepared.training.max_tokens_per_micro_batch)
    share = _count_tokens(config, usual) / _count_tokens(config, probe)
    spec = replace(build_policy_spec(config, prepared), role=role, seed=0, teachers=other_models.paths)
    try:
        found = measure_step_time(spec, sizes.num_layers, probe, loss)
    except ChildProcessError as error:
        report.notes.append(f"the time of a step is not estimated: {error}.")
        return
    training, evaluation, pass_s = prepared.training, config.evaluation, share * found.measure_s
    step_s = share * found.learn_s + found.optimizer_s + other_models.passes_per_step * pass_s
    held_out = min(evaluation.num_examples, report.num_held_out) / training.examples_per_step
    drawn = min(training.num_steps, prepared.examples.train.num_items / training.examples_per_step)
    before_s = other_models.passes_before * (drawn + held_out) * pass_s
    during = (training.num_steps - 1) // evaluation.every_num_steps if evaluation.every_num_steps else 0
    times = (during + 1 + evaluation.before_training) if held_out else 0
    total = before_s + training.num_steps * step_s + times * held_out * pass_s
    report.step_s = step_s
    parts = f", including {before_s / 60:.1f} before the first step" if before_s else ""
    parts += ", and the answers of engines" if evaluation.answers is not None else ""
    report.batch.append(
        f"about {step_s:.3g} s per step on this machine, {total / 60:.1f} minutes in all{parts} (measured on few "
        "layers)"
    )


def _take_first_units(batch: TrainingBatch, num_tokens: int) -> TrainingBatch:
    """Return the first loss units of a batch that have `num_tokens` tokens in total; all units if there are fewer."""
    samples: list[TrainingSample] = []
    for sample in batch.samples:
        if sum(map(len, samples)) >= num_tokens and sample.unit != samples[-1].unit:
            break
        samples.append(sample)
    return TrainingBatch(samples=tuple(samples), temperature=batch.temperature)
