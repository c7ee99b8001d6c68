"""From a finished batch of rollouts to what a step learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll.algorithms.selection import Selection, select
from roll.pipelines.learning.demonstrations import demonstrations
from roll.pipelines.parts import Parts
from roll.pipelines.scheduling import GREEDY
from roll.rollout import Batch, DataLedger
from roll.types import Fate, Rollout

__all__ = ["Collected", "chosen", "collect", "settle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """A step's groups, and what it learns from."""

    batch: Batch
    selection: Selection
    demonstrations: tuple[Rollout, ...] = ()
    """Of prompts of the batch, whether the selection has them or not."""


async def collect(parts: Parts) -> Collected:
    """Wait for the next batch, and choose; may be cancelled at any moment.

    With `filters.refill` (dynamic sampling, DAPO, arXiv 2503.14476 eq. 11) the batch also holds the groups that were
    left out and replaced. Every draw in it gets a fate.
    """
    ahead = parts.config.rollout.scheduling.async_ratio > 0
    with parts.stages.waiting("wait" if ahead else "generate"):
        batch = await parts.controller.next_batch()
        shown = await demonstrations(parts, [group.draw for group in batch.groups])
    return chosen(parts, batch, shown)


def chosen(parts: Parts, batch: Batch, demonstrations: Sequence[Rollout]) -> Collected:
    """What a step learns from, of a batch and of demonstrations of its prompts."""
    with parts.spans.phase("advantages"):
        selection = select(
            batch.groups,
            parts.config.algorithm,
            max_new_tokens=parts.config.rollout.max_new_tokens,
            moments=parts.state.moments,
            greedy=batch.companions.get(GREEDY, ()),
            demonstrations=demonstrations,
            left_out=batch.left_out,
        )
    selection.fates.update({draw_id: (Fate.EXPIRED, why) for draw_id, why in batch.expired.items()})
    return Collected(batch=batch, selection=selection, demonstrations=tuple(demonstrations))


def settle(ledger: DataLedger, selection: Selection, step: int) -> None:
    """Write every group's fate into the ledger."""
    for draw_id, (fate, why) in selection.fates.items():
        ledger.settle(draw_id, fate, step, why)
