"""The RL objective: selects the rollouts of a step from finished groups, and updates the weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from roll.algorithms.selection import Selection, select_training_rollouts
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.pipelines.learning.gradient_stream import GradientStream
from roll.pipelines.learning.measures import compute_learning_metrics, compute_mean_advantages
from roll.pipelines.learning.token_columns import build_token_columns
from roll.pipelines.learning.updates import learn
from roll.pipelines.online.boundary import collect_draw_outcomes
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.online.protocols import CollectedBatch, UpdateOutcome
from roll.pipelines.reinforcement.demonstrations import play_demonstrations
from roll.pipelines.reinforcement.sampling import GREEDY_PURPOSE
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout import Batch
from roll.types import Rollout

__all__ = ["DemonstrationSource", "ReinforcementObjective", "build_demonstration_player", "open_gradient_stream"]

C = TypeVar("C", bound=ReinforcementRunConfig)

DemonstrationSource: TypeAlias = Callable[[Batch], Awaitable[Sequence[Rollout]]]
"""Coroutine function that returns demonstrations of a batch's prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforcementObjective(Generic[C]):
    """The objective of runs with an `algorithm` section; implements `Objective`."""

    online: OnlineRun[C, Any]
    get_demonstrations: DemonstrationSource
    stream: GradientStream | None = None
    """Stream that adds gradients while a batch is collected; `None` if only whole batches are trained."""

    async def collect(self, batch: Batch) -> CollectedBatch[Selection]:
        """Select the rollouts to train on; may be canceled at any time.

        With `filters.refill` (dynamic sampling, DAPO, arXiv 2503.14476 eq. 11) the batch also contains the groups that
        were filtered out and replaced. Every draw of the batch gets an outcome (trained, filtered, failed, …) for the
        ledger.
        """
        config, run = self.online.config, self.online.run
        shown = tuple(await self.get_demonstrations(batch))
        with run.spans.phase("advantages"):
            selection = select_training_rollouts(
                batch.groups,
                config.algorithm,
                max_new_tokens=config.rollout.max_new_tokens,
                moments=run.state.moments,
                greedy=batch.companions.get(GREEDY_PURPOSE, ()),
                demonstrations=shown,
                known_outcomes=collect_draw_outcomes(batch),
            )
        return CollectedBatch(
            batch=batch,
            choice=selection,
            rollouts=selection.rollouts,
            draw_outcomes=selection.draw_outcomes,
            demonstrations=shown,
        )

    async def learn(self, collected: CollectedBatch[Selection]) -> UpdateOutcome:
        """Update the critics and the policy; the number of the step is `state.step + 1`."""
        online, config, selection = self.online, self.online.config, collected.choice
        run = online.run
        learned = await learn(run, online.learner, config.algorithm, selection, config.rollout, self.stream)
        metrics = compute_learning_metrics(learned.batch, learned.results, learned.critic_results) | learned.metrics
        if config.has_demonstrations:
            metrics["data/demonstrations"] = float(len(selection.demonstrations))
        is_recorded = config.tracking.rollouts and config.tracking.token_columns
        seed, updates = (run.seed, run.state.step), config.algorithm.updates
        return UpdateOutcome(
            metrics=metrics,
            has_new_weights=learned.has_new_weights,
            advantages=compute_mean_advantages(learned.batch),
            tokens=build_token_columns(learned.batch, learned.results, updates, seed) if is_recorded else {},
        )

    def update_state(self, collected: CollectedBatch[Selection]) -> None:
        """Store the moments of all rewards in the run's state."""
        self.online.run.state.moments = collected.choice.moments


def build_demonstration_player(online: OnlineRun[C, ServedPolicy]) -> DemonstrationSource:
    """Return a function that executes the demonstrations of a batch's prompts."""

    async def play(batch: Batch) -> Sequence[Rollout]:
        if online.config.algorithm.imitation.weight == 0:
            return ()
        repeated = [group.draw for group in batch.groups if group.scored_rollouts or group.draw.anchor is None]
        with online.policy_engines.measure_wait("wait" if online.is_asynchronous else "generate"):
            return await play_demonstrations(online.config, online.policy_engines, repeated)

    return play


def open_gradient_stream(
    online: OnlineRun[C, ServedPolicy],
) -> tuple[OnlineRun[C, ServedPolicy], GradientStream | None]:
    """Return the run; if it trains on finished groups early, a gradient stream replaces the source of its batches."""
    config, engines, controller = online.config, online.policy_engines, online.policy_engines.controller
    overlaps = engines.devices is not None and engines.devices.rule == "elastic_overlap"
    if not config.streams_training and not (overlaps and not config.find_streaming_problem()):
        return online, None
    assert controller is not None, "a run that trains has a controller"
    stream = GradientStream(controller, engines, online.run, online.learner, config.algorithm, config.rollout)
    return replace(online, batches=stream), stream
