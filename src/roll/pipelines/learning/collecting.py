"""From a finished batch of rollouts to what a step learns from."""

from __future__ import annotations

from dataclasses import dataclass

from roll.pipelines.learning.demonstrations import demonstrations
from roll.pipelines.learning.selection import Selection, select
from roll.pipelines.parts import Parts
from roll.pipelines.scheduling import GREEDY
from roll.rollout import Batch, Fate

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """A step's groups, and what it learns from."""

    batch: Batch
    selection: Selection


async def collect(parts: Parts) -> Collected:
    """Wait for the next batch, and choose; may be cancelled at any moment.

    With `filters.refill` (dynamic sampling, DAPO, arXiv 2503.14476 eq. 11) the batch also holds the groups that were
    left out and replaced. Every draw in it gets a fate.
    """
    ahead = parts.config.rollout.scheduling.async_ratio > 0
    with parts.spans.phase("wait" if ahead else "generate"):
        batch = await parts.controller.next_batch()
        shown = await demonstrations(parts, [group.draw for group in batch.groups])
    with parts.spans.phase("advantages"):
        selection = select(
            batch.groups,
            parts.config.algorithm,
            max_length=parts.config.max_answer_tokens,
            moments=parts.state.moments,
            greedy=batch.companions.get(GREEDY, ()),
            demonstrations=shown,
            left_out=batch.left_out,
        )
    selection.fates.update({draw_id: (Fate.EXPIRED, why) for draw_id, why in batch.expired.items()})
    return Collected(batch=batch, selection=selection)
