"""Outcomes of a step's draws, and metrics of its rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from roll.algorithms.hacking import compute_hacking_metrics
from roll.pipelines import measures
from roll.pipelines.learning.state import LearningState
from roll.rollout import Batch, DataLedger
from roll.types import Fate

__all__ = ["collect_fates", "compute_step_metrics", "record_fates"]


def collect_fates(batch: Batch) -> dict[int, tuple[Fate, str]]:
    """Return, by draw id, the outcome of each draw that is not trained, and the reason.

    Outcomes are `FILTERED` (replaced or stopped early) and `EXPIRED`.
    """
    left_out = {draw_id: (Fate.FILTERED, why) for draw_id, why in batch.left_out.items()}
    return left_out | {draw_id: (Fate.EXPIRED, why) for draw_id, why in batch.expired.items()}


def record_fates(ledger: DataLedger, fates: Mapping[int, tuple[Fate, str]], step: int) -> None:
    """Record the outcomes `fates` of draws in the ledger, as outcomes of step `step`."""
    for draw_id, (fate, why) in fates.items():
        ledger.record_outcome(draw_id, fate, step, why)


async def compute_step_metrics(
    state: LearningState, batch: Batch, fates: Mapping[int, tuple[Fate, str]]
) -> dict[str, float]:
    """Compute the metrics of a step's rollouts, its batch, the outcomes of its draws, and reward hacking."""
    metrics = (
        measures.compute_rollout_metrics(batch.groups)
        | measures.compute_group_metrics(fates)
        | measures.compute_batch_metrics(batch)
    )
    found = await asyncio.to_thread(
        compute_hacking_metrics, batch.groups, list(state.first_lengths)
    )  # seconds, if many
    return metrics | found
