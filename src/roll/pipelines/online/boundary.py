"""Fates of a step's draws, and metrics of its rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from roll.algorithms.hacking import hacking_metrics
from roll.pipelines import measures
from roll.pipelines.learning.state import LearningState
from roll.rollout import Batch, DataLedger
from roll.types import Fate

__all__ = ["fates_of_groups", "settle", "step_metrics"]


def fates_of_groups(batch: Batch) -> dict[int, tuple[Fate, str]]:
    """Return by draw id the fates of groups that were stopped early and of abandoned draws."""
    left_out = {draw_id: (Fate.FILTERED, why) for draw_id, why in batch.left_out.items()}
    return left_out | {draw_id: (Fate.EXPIRED, why) for draw_id, why in batch.expired.items()}


def settle(ledger: DataLedger, fates: Mapping[int, tuple[Fate, str]], step: int) -> None:
    """Settle every group's fate in the ledger."""
    for draw_id, (fate, why) in fates.items():
        ledger.settle(draw_id, fate, step, why)


async def step_metrics(state: LearningState, batch: Batch, fates: Mapping[int, tuple[Fate, str]]) -> dict[str, float]:
    """Compute the metrics of a step's rollouts, of its batch and of the fates of its draws, and of reward hacking."""
    metrics = measures.rollout_metrics(batch.groups) | measures.fate_metrics(fates) | measures.batch_metrics(batch)
    found = await asyncio.to_thread(hacking_metrics, batch.groups, list(state.first_lengths))  # seconds, if many
    return metrics | found
