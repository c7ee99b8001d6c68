"""Measuring the policy on held-out prompts; every evaluation of a run uses the same prompts and the same seeds."""

from __future__ import annotations

from roll.pipelines import measures
from roll.pipelines.parts import Parts

__all__ = ["evaluate"]


async def evaluate(parts: Parts) -> dict[str, float]:
    """Answer the held-out prompts, record the metrics, and note the accuracy in the run's state."""
    state, step = parts.state, parts.state.step
    groups = await parts.scheduler.collect(parts.held_out, parts.eval_plan)
    metrics = measures.evaluation_metrics(groups)
    accuracy = metrics["eval/accuracy"]
    best = max(state.accuracies.values(), default=float("-inf"))
    state.accuracies[str(step)] = accuracy
    state.evaluated_at = step
    if accuracy > best:
        state.best_step = step
    parts.tracker.log_evaluation(step, metrics, groups)
    return metrics
