"""Measuring the policy on held-out prompts; every evaluation of a run uses the same prompts and the same seeds."""

from __future__ import annotations

import logging

from roll.errors import AlarmError
from roll.pipelines import measures
from roll.pipelines.learning.failures import check_failures, describe, failures_of
from roll.pipelines.parts import Parts

__all__ = ["evaluate"]

logger = logging.getLogger(__name__)


async def evaluate(parts: Parts) -> dict[str, float]:
    """Answer the held-out prompts, record the metrics, and note the score in the run's state.

    Raises:
        AlarmError: we failed every answer before the first step, so that training would fail in the same way.
    """
    state, step = parts.state, parts.state.step
    groups = await parts.scheduler.collect(parts.held_out, parts.eval_plan)
    metrics = measures.evaluation_metrics(groups)
    state.evaluated_at = step
    if "eval/score" in metrics:
        _note(parts, step, metrics["eval/score"])
    parts.tracker.log_evaluation(step, metrics, groups)
    failures = failures_of(groups)
    if text := describe(failures):
        logger.warning("evaluation after step %d: %s", step, text)
    alarms = check_failures(parts.config.alarms, [failures.counts], failures, first=True) if step == 0 else []
    if stopping := [alarm.message for alarm in alarms if alarm.stops]:
        raise AlarmError("; ".join(stopping))
    return metrics


def _note(parts: Parts, step: int, score: float) -> None:
    """The model before training is no candidate: where it is as good as any, the best that training made is kept."""
    state = parts.state
    best = max((found for at, found in state.scores.items() if at != "0"), default=float("-inf"))
    state.scores[str(step)] = score
    if step > 0 and score > best:
        state.best_step = step
