"""From a collected batch to a step's boundary: learning, weight sync, everything's fate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TypeVar

from roll.config.reinforcing import ReinforcingConfig
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.learning.token_columns import token_columns
from roll.pipelines.learning.updates import learn
from roll.pipelines.online.boundary import batch_figures, cross_boundary
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.rlvr.collecting import Collected
from roll.tracking.rollout_table import TokenColumns

__all__ = ["learn_from"]

C = TypeVar("C", bound=ReinforcingConfig)


async def learn_from(
    online: OnlineRun[C], collected: Collected, figures: Mapping[str, float] | None = None
) -> list[str]:
    """Learn from a batch, bring the weights to engines, and cross the boundary; returns alarms that stop the run.

    Args:
        online: the run.
        collected: its batch.
        figures: further ones of the step.
    """
    run, selection = online.run, collected.selection
    metrics = {**await _update(online, collected), **(figures or {})}
    run.mid_update, run.state.moments = True, selection.moments
    trained = {rollout.rollout_id for rollout in selection.rollouts}
    shown = collected.demonstrations
    return await cross_boundary(online, collected.batch, selection.fates, trained, metrics, shown)


async def _update(online: OnlineRun[C], collected: Collected) -> dict[str, float]:
    """New weights, where engines are, too; returns metrics. The step is `state.step + 1`."""
    run, live, config = online.run, online.live, online.config
    state, selection, batch = run.state, collected.selection, collected.batch
    metrics = await batch_figures(state, batch, selection.fates)
    advantages: dict[str, float] = {}
    tokens: TokenColumns = {}
    if selection.rollouts:
        async with live.learning(run) if live else nullcontext():
            learned = await learn(run, online.learner, config.algorithm, selection, config.rollout)
            metrics |= learning_metrics(learned.batch, learned.results, learned.critic_results) | learned.metrics
            if config.has_demonstrations:
                metrics["data/demonstrations"] = float(len(selection.demonstrations))
            advantages = mean_advantages(learned.batch)
            if config.tracking.rollouts and config.tracking.token_columns:
                seed = (run.seed, state.step)
                tokens = token_columns(learned.batch, learned.results, config.algorithm.updates, seed)
            if learned.stepped:
                state.policy_version += 1
                metrics |= (await live.sync(run)).metrics() if live else {}
    with run.spans.phase("record"):
        run.tracker.log_rollouts(state.step + 1, batch.groups, advantages, tokens)
    return metrics
