"""From a collected batch to a step's boundary: learning, weight sync, everything's fate."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext

from roll.algorithms.hacking import BASELINE_STEPS, hacking_metrics
from roll.pipelines import measures
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.failures import step_alarms
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.learning.updates import learn
from roll.pipelines.rlvr.circle import Circle
from roll.pipelines.rlvr.collecting import Collected, settle
from roll.tracking.engine_trace import trace_engine_steps

__all__ = ["learn_from", "remember_verifiers"]

logger = logging.getLogger(__name__)


async def learn_from(circle: Circle, collected: Collected) -> list[str]:
    """Learn from a batch, bring the weights to engines, and cross the boundary; returns alarms that stop the run."""
    return await _cross_boundary(circle, collected, await _update(circle, collected))


async def _update(circle: Circle, collected: Collected) -> dict[str, float]:
    """New weights, where engines are, too; returns metrics. The step is `state.step + 1`."""
    run, live, config = circle.run, circle.live, circle.config
    state, selection, batch = run.state, collected.selection, collected.batch
    metrics = measures.rollout_metrics(batch.groups) | measures.selection_metrics(selection)
    metrics |= measures.batch_metrics(batch)
    metrics |= await asyncio.to_thread(hacking_metrics, batch.groups, list(state.first_lengths))  # seconds, if many
    advantages: dict[str, float] = {}
    if selection.rollouts:
        async with live.learning(run) if live else nullcontext():
            learned = await learn(run, circle.learner, config.algorithm, selection, config.rollout)
            metrics |= learning_metrics(learned.batch, learned.results, learned.critic_results) | learned.metrics
            if any(entry.has_demonstrations for entry in config.data):
                metrics["data/demonstrations"] = float(sum(s.expert for s in learned.batch.samples))
            advantages = mean_advantages(learned.batch)
            if learned.stepped:
                state.policy_version += 1
                metrics |= (await live.sync(run)).metrics() if live else {}
    with run.spans.phase("record"):
        run.tracker.log_rollouts(state.step + 1, batch.groups, advantages)
    return metrics


async def _cross_boundary(circle: Circle, collected: Collected, metrics: dict[str, float]) -> list[str]:
    """The step is done: everything gets its fate, and the run may be saved."""
    run, live, limits = circle.run, circle.live, circle.config.alarms
    state, selection = run.state, collected.selection
    run.mid_update = True
    state.step += 1
    settle(run.ledger, selection, state.step)
    state.moments = selection.moments
    if "reward/mean" in metrics:  # something was answered
        state.first_lengths = [*state.first_lengths, metrics["rollout/length_mean"]][:BASELINE_STEPS]
    await circle.batches.settle(state.policy_version, {rollout.rollout_id for rollout in selection.rollouts})
    _mark_boundary(circle)
    run.mid_update = False
    state.alarms, alarms = check_alarms(limits, metrics, state.alarms)
    alarms += step_alarms(limits, state, collected.batch.groups, first=state.step == run.began_at + 1)
    metrics |= measures.run_metrics(state, run.ledger, circle.engine_counts())
    metrics |= live.generation.metrics() if live else {"rollout/retries": 0.0}
    for alarm in alarms:
        logger.warning("%s", alarm.message)
    with run.spans.phase("record"):
        if circle.recorder is not None:
            await circle.recorder.record(state, collected.batch, collected.demonstrations)
        if live is not None:
            trace_engine_steps(live.generation.proxy.engines, run.spans.event)
        run.tracker.log_step(state.step, metrics | run.spans.metrics())
    return [alarm.message for alarm in alarms if alarm.stops]


def _mark_boundary(circle: Circle) -> None:
    """Note what was drawn, and what of it is in flight, so that a resumed run launches exactly that again."""
    state, stream = circle.run.state, circle.run.stream
    state.data = stream.state()
    state.num_draws = stream.num_drawn
    state.pending = [[d.draw_id, d.prompt.domain, d.position] for d in circle.batches.in_flight()]
    remember_verifiers(circle)


def remember_verifiers(circle: Circle) -> None:
    """Note what rewards know that later judgements depend on."""
    if circle.live is not None:
        states = {domain: reward.state() for domain, reward in circle.live.generation.rewards.items()}
        circle.run.state.verifiers = {domain: state for domain, state in states.items() if state}
