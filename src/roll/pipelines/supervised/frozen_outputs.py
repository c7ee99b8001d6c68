"""Outputs of a frozen model for all examples of a run, computed before its first step.

remaining draws, held-out examples ─► samples without stored outputs ─ the model, frozen ─► store

The model is unloaded before the policy starts, so the two are never in memory together. A reference computes the
batches of the run's steps, packed and rounded as in an update: before the first update, log-ratios to the initial
policy are exactly 0, even in bfloat16.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from roll.cluster.base import Cluster
from roll.models.fingerprint import compute_model_fingerprint
from roll.pipelines.run import Session, restore_state
from roll.pipelines.supervised.output_store import OutputStore, Rows
from roll.pipelines.supervised.preparation import PreparedRun
from roll.pipelines.supervised.supervised_run import draw_next_examples, render_draws
from roll.protocols import TrainerGroup
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["CHUNK_SIZE", "ComputeOutputs", "build_weights_name", "compute_missing_outputs", "list_remaining_steps"]

CHUNK_SIZE = 256
"""Approximate number of samples that are written at once."""
ComputeOutputs = Callable[[TrainerGroup, TrainingBatch], Coroutine[Any, Any, list[Rows]]]
"""Function that computes a model's outputs for a batch: the rows of each sample."""


def build_weights_name(spec: TrainerSpec) -> str:
    """Return the name under which a model's outputs are stored: fingerprint of the weights, dtype, FP8 recipe."""
    recipe = "" if spec.training.fp8 == "none" else f"-{spec.training.fp8}"
    return f"{compute_model_fingerprint(Path(spec.model_path))}-{spec.model.dtype}{recipe}"


async def compute_missing_outputs(
    cluster: Cluster,
    spec: TrainerSpec,
    store: OutputStore,
    batches: Sequence[Sequence[TrainingSample]],
    compute: ComputeOutputs,
    *,
    model_name: str,
    session: Session | None = None,
) -> None:
    """Compute and store the outputs that `store` lacks; if it has all, the model is not started.

    Args:
        cluster: Cluster on which the model is started.
        spec: Spec of the model.
        store: Store of the outputs.
        batches: Batches of complete loss units, such as pairs. Each batch is computed in one call, so that packing and
            rounding are the same as in training.
        compute: Computes the outputs of a batch.
        model_name: Name of the model, for messages.
        session: Session that shows the progress.
    """
    missing = {id(sample) for sample in store.find_missing(chain.from_iterable(batches))}
    if not missing:
        return
    note: Callable[[str], object] = session.tracker.note if session else _discard_note
    note(f"starting {model_name} to score {len(missing):,} examples")
    trainer = await cluster.start_trainer(spec, "actor_train")
    try:
        new: list[tuple[TrainingSample, Rows]] = []
        num_kept = 0
        for batch in batches:
            units = {sample.unit for sample in batch if id(sample) in missing}
            if not units:
                continue
            part = tuple(sample for sample in batch if sample.unit in units)
            request = compute(trainer, TrainingBatch(samples=part))
            outputs = await (session.stop.run_unless_stopped(request) if session else request)
            new += [(sample, rows) for sample, rows in zip(part, outputs, strict=True) if id(sample) in missing]
            if len(new) >= CHUNK_SIZE or num_kept + len(new) == len(missing):
                await asyncio.to_thread(store.add, [sample for sample, _ in new], [rows for _, rows in new])
                num_kept += len(new)
                new.clear()
                note(f"{model_name}: {num_kept:,} of {len(missing):,} examples")
    finally:
        await trainer.close()


def list_remaining_steps(
    prepared: PreparedRun, session: Session, *, repeat_examples: bool = False
) -> list[tuple[TrainingSample, ...]]:
    """Return the samples of each remaining step of the run.

    Args:
        prepared: Prepared data of the run; afterwards its stream is at the position where the run resumes.
        session: Session with the checkpoint from which the run resumes.
        repeat_examples: Whether to include examples that also occur in an earlier step.
    """
    stream = prepared.examples.train
    state = restore_state(session.saved, stream)
    seen: set[str] = set()
    steps = []
    try:
        for _ in range(state.step, prepared.training.num_steps):
            draws = draw_next_examples(prepared.examples, prepared.training)
            if not repeat_examples:
                draws = list({draw.uid: draw for draw in draws if draw.uid not in seen}.values())
                seen |= {draw.uid for draw in draws}
            steps.append(render_draws(draws, prepared.examples).samples)
            if not repeat_examples and len(seen) == stream.num_items:
                break
    finally:
        stream.restore(state.data)
    return steps


def _discard_note(text: str) -> None:
    """Ignore a message; replaces the tracker's notes outside a run."""
