"""What a frozen model says of everything that a run will learn from, before its first step.

remaining draws, held-out examples ─► samples of which nothing is kept ─ the model, frozen ─► kept

The model is let go before the policy starts, so the two never share memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from roll.cluster.base import Cluster
from roll.models.fingerprint import model_fingerprint
from roll.pipelines.run import Session, beginning
from roll.pipelines.supervised.course import next_draws, rendered
from roll.pipelines.supervised.kept import Kept, Rows
from roll.pipelines.supervised.preparation import Prepared
from roll.protocols import TrainerGroup
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["Ask", "ask_once", "remaining_steps", "weights_name"]

CHUNK = 256
"""Samples that are computed and written at once."""
Ask = Callable[[TrainerGroup, TrainingBatch], Coroutine[Any, Any, list[Rows]]]
"""What the model is asked of a batch: the rows of each sample."""


def weights_name(spec: TrainerSpec) -> str:
    """By which weights, and how they are computed with, what a model says is kept."""
    return f"{model_fingerprint(Path(spec.model_path))}-{spec.model.dtype}"


async def ask_once(
    cluster: Cluster,
    spec: TrainerSpec,
    kept: Kept,
    samples: list[TrainingSample],
    ask: Ask,
    *,
    who: str,
    session: Session | None = None,
) -> None:
    """Let a model say what is not kept yet; nothing starts where all is."""
    missing = kept.missing(samples)
    if not missing:
        return
    note: Callable[[str], object] = session.tracker.note if session else _say_nothing
    note(f"starting {who}, which is asked of {len(missing):,} examples")
    trainer = await cluster.start_trainer(spec, "actor_train")
    try:
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            asked = ask(trainer, TrainingBatch(samples=tuple(chunk)))
            said = await (session.stop.unless(asked) if session else asked)
            await asyncio.to_thread(kept.add, chunk, said)
            note(f"{who}: {start + len(chunk):,} of {len(missing):,} examples")
    finally:
        await trainer.close()


def remaining_steps(prepared: Prepared, session: Session, *, again: bool = False) -> list[tuple[TrainingSample, ...]]:
    """The samples of every step that the run still has.

    Args:
        prepared: of the run; its stream stands afterwards where the run goes on.
        session: where that is.
        again: also examples that an earlier of these steps has.
    """
    stream = prepared.examples.train
    state = beginning(session.saved, stream)
    seen: set[str] = set()
    steps = []
    try:
        for _ in range(state.step, prepared.training.num_steps):
            draws = next_draws(prepared.examples, prepared.training)
            if not again:
                draws = list({draw.uid: draw for draw in draws if draw.uid not in seen}.values())
                seen |= {draw.uid for draw in draws}
            steps.append(rendered(draws, prepared.examples).samples)
            if not again and len(seen) == stream.num_items:
                break
    finally:
        stream.restore(state.data)
    return steps


def _say_nothing(text: str) -> None:
    """For work that is no run."""
