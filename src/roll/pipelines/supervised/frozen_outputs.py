"""Outputs of a frozen model for all examples of a run, computed before its first step.

remaining draws, held-out examples ─► samples without stored outputs ─ the model, frozen ─► store

The model is unloaded before the policy starts, so the two are never in memory together. A reference computes the
batches of the run's steps, packed and rounded as in an update: before the first update, log-ratios to the initial
policy are exactly 0, also in bfloat16.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from roll.cluster.base import Cluster
from roll.models.fingerprint import model_fingerprint
from roll.pipelines.run import Session, restore_state
from roll.pipelines.supervised.output_store import OutputStore, Rows
from roll.pipelines.supervised.preparation import Prepared
from roll.pipelines.supervised.supervised_run import next_draws, render_draws
from roll.protocols import TrainerGroup
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["CHUNK", "ComputeOutputs", "compute_once", "remaining_steps", "weights_name"]

CHUNK = 256
"""Approximate number of samples that are written at once."""
ComputeOutputs = Callable[[TrainerGroup, TrainingBatch], Coroutine[Any, Any, list[Rows]]]
"""Function that computes a model's outputs for a batch: the rows of each sample."""


def weights_name(spec: TrainerSpec) -> str:
    """Return the name under which a model's outputs are stored: its weights, dtype and FP8 recipe."""
    recipe = "" if spec.training.fp8 == "none" else f"-{spec.training.fp8}"
    return f"{model_fingerprint(Path(spec.model_path))}-{spec.model.dtype}{recipe}"


async def compute_once(
    cluster: Cluster,
    spec: TrainerSpec,
    kept: OutputStore,
    batches: Sequence[Sequence[TrainingSample]],
    ask: ComputeOutputs,
    *,
    who: str,
    session: Session | None = None,
) -> None:
    """Compute and store the outputs that are missing; the model is not started if none is.

    Args:
        cluster: Cluster on which the model is started.
        spec: Spec of the model.
        kept: Store of the outputs.
        batches: Batches, each computed at once in whole units as in training, so that packing and rounding are equal.
        ask: Function that computes the outputs of a batch.
        who: Name of the model, for messages.
        session: Session that shows the progress.
    """
    missing = {id(sample) for sample in kept.find_missing(chain.from_iterable(batches))}
    if not missing:
        return
    note: Callable[[str], object] = session.tracker.note if session else _say_nothing
    note(f"starting {who}, which is asked of {len(missing):,} examples")
    trainer = await cluster.start_trainer(spec, "actor_train")
    try:
        new: list[tuple[TrainingSample, Rows]] = []
        num_kept = 0
        for batch in batches:
            units = {sample.unit for sample in batch if id(sample) in missing}
            if not units:
                continue
            part = tuple(sample for sample in batch if sample.unit in units)
            asked = ask(trainer, TrainingBatch(samples=part))
            said = await (session.stop.run_unless_stopped(asked) if session else asked)
            new += [(sample, rows) for sample, rows in zip(part, said, strict=True) if id(sample) in missing]
            if len(new) >= CHUNK or num_kept + len(new) == len(missing):
                await asyncio.to_thread(kept.add, [sample for sample, _ in new], [rows for _, rows in new])
                num_kept += len(new)
                new.clear()
                note(f"{who}: {num_kept:,} of {len(missing):,} examples")
    finally:
        await trainer.close()


def remaining_steps(prepared: Prepared, session: Session, *, again: bool = False) -> list[tuple[TrainingSample, ...]]:
    """Return the samples of every remaining step of the run.

    Args:
        prepared: Prepared data of the run; afterwards its stream is at the position where the run resumes.
        session: The session with that position.
        again: Whether to include examples that an earlier one of the steps has.
    """
    stream = prepared.examples.train
    state = restore_state(session.saved, stream)
    seen: set[str] = set()
    steps = []
    try:
        for _ in range(state.step, prepared.training.num_steps):
            draws = next_draws(prepared.examples, prepared.training)
            if not again:
                draws = list({draw.uid: draw for draw in draws if draw.uid not in seen}.values())
                seen |= {draw.uid for draw in draws}
            steps.append(render_draws(draws, prepared.examples).samples)
            if not again and len(seen) == stream.num_items:
                break
    finally:
        stream.restore(state.data)
    return steps


def _say_nothing(text: str) -> None:
    """Ignore messages; used for work outside a run."""
