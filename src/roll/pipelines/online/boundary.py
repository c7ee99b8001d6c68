"""Outcomes of a step's draws, and metrics of its rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from roll.algorithms.hacking import compute_hacking_metrics
from roll.pipelines import measures
from roll.pipelines.learning.state import LearningState
from roll.rollout import Batch, DataLedger
from roll.types import DrawOutcome

__all__ = ["collect_draw_outcomes", "compute_step_metrics", "record_draw_outcomes"]


def collect_draw_outcomes(batch: Batch) -> dict[int, tuple[DrawOutcome, str]]:
    """Return the outcome and the reason of each draw that is not used for training, by draw ID.

    Outcomes are `FILTERED` (replaced or stopped early) and `EXPIRED`.
    """
    left_out = {draw_id: (DrawOutcome.FILTERED, why) for draw_id, why in batch.rejection_reasons.items()}
    return left_out | {draw_id: (DrawOutcome.EXPIRED, why) for draw_id, why in batch.expired.items()}


def record_draw_outcomes(ledger: DataLedger, draw_outcomes: Mapping[int, tuple[DrawOutcome, str]], step: int) -> None:
    """Record the outcomes of draws in the ledger, as outcomes of step `step`."""
    for draw_id, (outcome, why) in draw_outcomes.items():
        ledger.record_outcome(draw_id, outcome, step, why)


async def compute_step_metrics(
    state: LearningState, batch: Batch, draw_outcomes: Mapping[int, tuple[DrawOutcome, str]]
) -> dict[str, float]:
    """Compute the metrics of a step's rollouts, its batch, the outcomes of its draws, and reward hacking."""
    metrics = (
        measures.compute_rollout_metrics(batch.groups)
        | measures.compute_group_metrics(draw_outcomes)
        | measures.compute_batch_metrics(batch)
    )
    found = await asyncio.to_thread(
        compute_hacking_metrics, batch.groups, list(state.first_lengths)
    )  # seconds, if many
    return metrics | found
