"""From a finished batch of rollouts to what a step learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from roll.algorithms.selection import Selection, select
from roll.config.reinforcing import ReinforcingConfig
from roll.pipelines.learning.state import LearningState
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.online.boundary import decided
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.rlvr.demonstrations import demonstrations
from roll.pipelines.rlvr.sampling import GREEDY
from roll.pipelines.run import Run
from roll.rollout import Batch
from roll.types import Rollout

__all__ = ["Collected", "chosen", "collect"]

C = TypeVar("C", bound=ReinforcingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """A step's groups, and what it learns from."""

    batch: Batch
    selection: Selection
    demonstrations: tuple[Rollout, ...] = ()
    """Of prompts of the batch, whether the selection has them or not."""


async def collect(online: OnlineRun[C], live: LivePolicy) -> Collected:
    """Wait for the next batch, and choose; may be cancelled at any moment.

    With `filters.refill` (dynamic sampling, DAPO, arXiv 2503.14476 eq. 11) the batch also holds the groups that were
    left out and replaced. Every draw in it gets a fate.
    """
    config = online.config
    ahead = config.rollout.scheduling.async_ratio > 0
    with live.generation.wait_phases.waiting("wait" if ahead else "generate"):
        batch = await online.batches.next_batch()
        repeated = [group.draw for group in batch.groups if group.scored or group.draw.anchor is None]
        shown = await demonstrations(config, live, repeated)
    return chosen(config, online.run, batch, shown)


def chosen(
    config: ReinforcingConfig, run: Run[LearningState], batch: Batch, demonstrations: Sequence[Rollout]
) -> Collected:
    """What a step learns from, of a batch and of demonstrations of its prompts."""
    with run.spans.phase("advantages"):
        selection = select(
            batch.groups,
            config.algorithm,
            max_new_tokens=config.rollout.max_new_tokens,
            moments=run.state.moments,
            greedy=batch.companions.get(GREEDY, ()),
            demonstrations=demonstrations,
            decided=decided(batch),
        )
    return Collected(batch=batch, selection=selection, demonstrations=tuple(demonstrations))
