"""What the loops of `rlvr` share: learning from a batch, weight sync, a step's boundary, evaluation."""

from __future__ import annotations

import asyncio
import logging

from roll.pipelines import measures
from roll.pipelines.evaluate import evaluate
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.collecting import Collected
from roll.pipelines.learning.failures import step_alarms
from roll.pipelines.learning.hacking import BASELINE_STEPS, hacking_metrics
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.learning.selection import settle
from roll.pipelines.learning.updates import learn
from roll.pipelines.parts import Parts
from roll.tracking.engine_trace import trace_engine_steps
from roll.weights import SyncReport

__all__ = [
    "cross_boundary",
    "evaluate_if_due",
    "evaluation_due",
    "sync",
    "update",
]

logger = logging.getLogger(__name__)


async def update(parts: Parts, collected: Collected) -> dict[str, float]:
    """Learn from a batch and bring the weights to the engines; returns metrics. The step is `state.step + 1`."""
    state, selection, batch = parts.state, collected.selection, collected.batch
    metrics = measures.rollout_metrics(batch.groups) | measures.selection_metrics(selection)
    metrics |= measures.batch_metrics(batch)
    metrics |= await asyncio.to_thread(hacking_metrics, batch.groups, list(state.first_lengths))  # seconds, if many
    advantages: dict[str, float] = {}
    if selection.rollouts:
        async with parts.weights.changing():
            learned = await learn(parts, selection)
            metrics |= learning_metrics(learned.batch, learned.results, learned.critic_results) | learned.metrics
            advantages = mean_advantages(learned.batch)
            if learned.stepped:
                state.policy_version += 1
                metrics |= (await sync(parts)).metrics()
    with parts.spans.phase("record"):
        parts.tracker.log_rollouts(state.step + 1, batch.groups, advantages)
    return metrics


async def sync(parts: Parts) -> SyncReport:
    """Bring the weights to every engine, which stand still meanwhile; one that died is replaced and brought to them."""
    if parts.evaluation is not None:  # an evaluation is of one policy; if it failed, the run ends at the boundary
        await asyncio.wait({parts.evaluation})
    with parts.spans.phase("sync"):
        report = await parts.weights.push(parts.state.policy_version, still=parts.controller.updating())
        parts.proxy.restore(report.dead)
    return report


async def cross_boundary(parts: Parts, collected: Collected, metrics: dict[str, float]) -> list[str]:
    """The step is done: everything gets its fate, and the run may be saved; returns alarms that stop it."""
    state, selection = parts.state, collected.selection
    parts.mid_update = True
    state.step += 1
    settle(parts.ledger, selection, state.step)
    state.moments = selection.moments
    if "reward/mean" in metrics:  # something was answered
        state.rewards.append(metrics["reward/mean"])
        state.first_lengths = [*state.first_lengths, metrics["rollout/length_mean"]][:BASELINE_STEPS]
    await parts.controller.settle(state.policy_version, {rollout.rollout_id for rollout in selection.rollouts})
    _mark_boundary(parts)
    parts.mid_update = False
    state.alarms, alarms = check_alarms(parts.config.alarms, metrics, state.alarms)
    first = state.step == parts.began_at + 1
    alarms += step_alarms(parts.config.alarms, state, collected.batch.groups, first=first)
    metrics |= parts.retries.metrics()
    metrics |= measures.run_metrics(state, parts.ledger, parts.proxy)
    metrics |= parts.judge.metrics() if parts.judge else {}
    for alarm in alarms:
        logger.warning("%s", alarm.message)
    with parts.spans.phase("record"):
        if parts.recorder is not None:
            await parts.recorder.record(state, collected.batch, collected.demonstrations)
        trace_engine_steps(parts.proxy.engines, parts.spans.event)
        parts.tracker.log_step(state.step, metrics | parts.spans.metrics())
    return [alarm.message for alarm in alarms if alarm.stops]


def _mark_boundary(parts: Parts) -> None:
    """Note what was drawn, and what of it is in flight, so that a resumed run launches exactly that again."""
    state = parts.state
    state.data = parts.data.train.state()
    state.num_draws = parts.data.train.num_drawn
    state.pending = [[d.draw_id, d.prompt.domain, d.position] for d in parts.controller.in_flight()]
    _remember_verifiers(parts)


def _remember_verifiers(parts: Parts) -> None:
    states = {domain: reward.state() for domain, reward in parts.rewards.items()}
    parts.state.verifiers = {domain: state for domain, state in states.items() if state}


def evaluation_due(parts: Parts) -> bool:
    """Whether the configuration asks for an evaluation after this step, it can be done, and was not done yet."""
    state, config = parts.state, parts.config.evaluation
    last = state.step == parts.config.training.num_steps
    every = config.every_num_steps
    due = config.before_training if state.step == 0 else last or bool(every and state.step % every == 0)
    return due and state.evaluated_at != state.step and bool(parts.held_out)


async def evaluate_if_due(parts: Parts) -> None:
    """Evaluate now, while nothing else runs."""
    if evaluation_due(parts):
        with parts.spans.phase("evaluate"):
            await parts.stop.unless(evaluate(parts))
        _remember_verifiers(parts)  # nothing else was scored meanwhile: this is still the boundary
