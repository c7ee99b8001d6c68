"""The RL objective: from finished groups to the selected rollouts of a step, and from them to new weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from roll.algorithms.selection import Selection, select
from roll.config.reinforcing import ReinforcingConfig
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.learning.token_columns import token_columns
from roll.pipelines.learning.updates import learn
from roll.pipelines.online.boundary import fates_of_groups
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.online.protocols import Collected, Update
from roll.pipelines.reinforcement.demonstrations import play_demonstrations
from roll.pipelines.reinforcement.sampling import GREEDY
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout import Batch
from roll.types import Rollout

__all__ = ["Reinforcement", "Shown", "live_demonstrations"]

C = TypeVar("C", bound=ReinforcingConfig)

Shown: TypeAlias = Callable[[Batch], Awaitable[Sequence[Rollout]]]
"""Returns demonstrations of a batch's prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reinforcement(Generic[C]):
    """Implements `Objective`."""

    online: OnlineRun[C, Any]
    shown: Shown

    async def collect(self, batch: Batch) -> Collected[Selection]:
        """Select the rollouts to train on; may be canceled at any moment.

        With `filters.refill` (dynamic sampling, DAPO, arXiv 2503.14476 eq. 11) the batch also has the groups that were
        left out and replaced. Every draw of the batch gets a fate.
        """
        config, run = self.online.config, self.online.run
        shown = tuple(await self.shown(batch))
        with run.spans.phase("advantages"):
            selection = select(
                batch.groups,
                config.algorithm,
                max_new_tokens=config.rollout.max_new_tokens,
                moments=run.state.moments,
                greedy=batch.companions.get(GREEDY, ()),
                demonstrations=shown,
                decided=fates_of_groups(batch),
            )
        return Collected(
            batch=batch, choice=selection, rollouts=selection.rollouts, fates=selection.fates, demonstrations=shown
        )

    async def learn(self, collected: Collected[Selection]) -> Update:
        """Update critics and policy; the step is `state.step + 1`."""
        online, config, selection = self.online, self.online.config, collected.choice
        run = online.run
        learned = await learn(run, online.learner, config.algorithm, selection, config.rollout)
        metrics = learning_metrics(learned.batch, learned.results, learned.critic_results) | learned.metrics
        if config.has_demonstrations:
            metrics["data/demonstrations"] = float(len(selection.demonstrations))
        is_recorded = config.tracking.rollouts and config.tracking.token_columns
        seed, updates = (run.seed, run.state.step), config.algorithm.updates
        return Update(
            metrics=metrics,
            stepped=learned.has_new_weights,
            advantages=mean_advantages(learned.batch),
            tokens=token_columns(learned.batch, learned.results, updates, seed) if is_recorded else {},
        )

    def note(self, collected: Collected[Selection]) -> None:
        """Store the moments of all rewards in the run's state."""
        self.online.run.state.moments = collected.choice.moments


def live_demonstrations(online: OnlineRun[C, ServedPolicy]) -> Shown:
    """Return a function that plays the demonstrations of a batch's prompts."""

    async def play(batch: Batch) -> Sequence[Rollout]:
        if online.config.algorithm.imitation.weight == 0:
            return ()
        repeated = [group.draw for group in batch.groups if group.scored or group.draw.anchor is None]
        with online.live.waiting("wait" if online.ahead else "generate"):
            return await play_demonstrations(online.config, online.live, repeated)

    return play
