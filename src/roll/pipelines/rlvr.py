"""Reinforcement learning with verifiable rewards, synchronous:

    generate → reward → filter → advantages → train → sync → evaluate

Work up to `advantages` may be thrown away at any moment (a signal, a crash): it changes nothing that lasts. What
follows runs to the step's boundary, where the run can be saved.
"""

from __future__ import annotations

import logging

from roll.errors import AlarmError
from roll.pipelines import measures
from roll.pipelines.evaluate import evaluate
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.collecting import Collected, collect
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.learning.selection import settle
from roll.pipelines.learning.updates import learn
from roll.pipelines.parts import Parts
from roll.pipelines.stop import Interrupted
from roll.weights import SyncReport

__all__ = ["run"]

logger = logging.getLogger(__name__)


async def run(parts: Parts) -> None:
    """Run the remaining steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    config, state = parts.config, parts.state
    try:
        with parts.spans.phase("sync"):
            await _sync(parts)
        await _evaluate_if_due(parts)
        while state.step < config.training.num_steps:
            with parts.spans.step(state.step + 1):
                collected = await parts.stop.unless(collect(parts))
                alarms = await _learn(parts, collected)
                await _evaluate_if_due(parts)
                if alarms or parts.checkpointer.due(state):
                    await _save(parts)
                if alarms:
                    raise AlarmError("; ".join(alarms))
    except Interrupted:
        _return_to_boundary(parts)
        await _save(parts)
        raise
    if config.checkpoint.at_end:
        await _save(parts)


async def _learn(parts: Parts, collected: Collected) -> list[str]:
    """Update the policy, bring it to the engines, and cross the step's boundary; returns alarms that stop the run."""
    state, selection = parts.state, collected.selection
    step = state.step + 1
    metrics = measures.rollout_metrics(collected.groups) | measures.selection_metrics(selection)
    metrics["data/refills"] = float(collected.num_refills)
    advantages: dict[str, float] = {}
    if selection.rollouts:
        learned = await learn(parts, selection)
        metrics |= learning_metrics(learned.batch, learned.results, learned.critic_results) | learned.metrics
        advantages = mean_advantages(learned.batch)
        if learned.stepped:
            state.policy_version += 1
            with parts.spans.phase("sync"):
                metrics |= (await _sync(parts)).metrics()
    settle(parts.ledger, selection, step)
    state.step = step
    state.moments = selection.moments
    state.data = parts.data.train.state()
    state.rewards.append(metrics["reward/mean"])
    state.alarms, messages = check_alarms(parts.config.alarms, metrics, state.alarms)
    metrics |= measures.run_metrics(state, parts.ledger, parts.proxy)
    for message in messages:
        logger.warning("%s", message)
    with parts.spans.phase("record"):
        parts.tracker.log_rollouts(step, collected.groups, advantages)
        parts.tracker.log_step(step, metrics | parts.spans.metrics())
    return messages if parts.config.alarms.action == "stop" else []


async def _sync(parts: Parts) -> SyncReport:
    """Bring the weights to every engine; one that died meanwhile is replaced and brought to them as well."""
    await parts.proxy.settle()
    report = await parts.weights.push(parts.state.policy_version)
    await parts.proxy.restore(report.dead)
    return report


async def _evaluate_if_due(parts: Parts) -> None:
    """Evaluate after this step, if the configuration asks for it and it was not done yet."""
    state, config = parts.state, parts.config.evaluation
    last = state.step == parts.config.training.num_steps
    every = config.every_num_steps
    due = config.before_training if state.step == 0 else last or bool(every and state.step % every == 0)
    if due and state.evaluated_at != state.step:
        with parts.spans.phase("evaluate"):
            await parts.stop.unless(evaluate(parts))


def _return_to_boundary(parts: Parts) -> None:
    """Forget draws of a step that did not finish; they will be drawn again."""
    parts.data.train.restore(parts.state.data)
    parts.ledger.forget_in_flight()


async def _save(parts: Parts) -> None:
    with parts.spans.phase("checkpoint"):
        await parts.checkpointer.save(parts.state, parts.ledger)
