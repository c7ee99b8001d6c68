"""Evaluates the policy on held-out prompts; every evaluation of a run uses the same prompts and the same seeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.cluster.base import open_cluster
from roll.config.alarms import AlarmsConfig
from roll.config.rollout import EvaluationConfig
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import AlarmError, DataError
from roll.pipelines import measures
from roll.pipelines.generation import open_generation, start_roles
from roll.pipelines.learning.failures import check_failures, count_failures, describe_failures
from roll.pipelines.preparation import PreparedRun, build_sampling_plans, open_media_dir, prepare
from roll.pipelines.run import Run
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout import SamplingPlan
from roll.types import Group, PromptDraw

__all__ = ["Evaluator", "measure"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Evaluator:
    """Decides when a run's policy is evaluated, and evaluates it."""

    run: Run[Any]
    """Run of the policy."""
    policy_engines: ServedPolicy
    """Engines that serve the policy."""
    held_out: Sequence[PromptDraw]
    """Held-out prompts, which every evaluation uses."""
    plan: SamplingPlan
    """Sampling settings of answers."""
    config: EvaluationConfig
    """Evaluation schedule."""
    alarms: AlarmsConfig
    """Thresholds of alarms."""

    @property
    def is_due(self) -> bool:
        """True if an evaluation after this step is configured, possible, and not done yet."""
        state, every = self.run.state, self.config.every_num_steps
        last = state.step == self.run.num_steps
        due = self.config.before_training if state.step == 0 else last or bool(every and state.step % every == 0)
        return due and state.evaluated_at != state.step and bool(self.held_out)

    async def evaluate_if_due(self) -> bool:
        """Evaluate the policy if an evaluation is due, and wait for the result; return whether it was due."""
        if not self.is_due:
            return False
        await self.policy_engines.wake()
        with self.run.spans.phase("evaluate"):
            await self.run.stop.run_unless_stopped(self.evaluate())
        return True

    def begin_if_due(self) -> None:
        """Start an evaluation in the background if one is due; the next weight sync waits until it ends."""
        if self.is_due:
            before = self.policy_engines.evaluation

            async def work() -> None:
                if before is not None:
                    await before
                with self.run.spans.phase("evaluate"):
                    await self.evaluate()

            self.policy_engines.evaluation = asyncio.create_task(work(), name="evaluate")

    def raise_last_error(self) -> None:
        """Raise the error of a background evaluation that failed."""
        if self.policy_engines.evaluation is not None and self.policy_engines.evaluation.done():
            self.policy_engines.evaluation.result()

    async def evaluate(self) -> dict[str, float]:
        """Evaluate on the held-out prompts, record the metrics, and store the score in the run's state.

        Raises:
            AlarmError: Before the first step, every answer had an infrastructure error, so training would fail as well.
        """
        run, step = self.run, self.run.state.step
        metrics, groups = await self.measure()
        run.state.evaluated_at = step
        if "eval/score" in metrics:
            run.state.record_score(step, metrics["eval/score"])
        run.tracker.log_evaluation(step, metrics, groups)
        self.check(groups)
        return metrics

    async def measure(self) -> tuple[dict[str, float], list[Group]]:
        """Evaluate on the held-out prompts, and return metrics and answers."""
        groups = await self.policy_engines.generation.scheduler.collect(self.held_out, self.plan)
        return measures.compute_evaluation_metrics(groups), groups

    def check(self, groups: Sequence[Group]) -> None:
        """Check an evaluation's answers for infrastructure failures, and log a warning if there are any.

        Raises:
            AlarmError: Before the first step, every answer had an infrastructure error, so training would fail as well.
        """
        step, failures = self.run.state.step, count_failures(groups)
        if text := describe_failures(failures):
            logger.warning("evaluation after step %d: %s", step, text)
        alarms = check_failures(self.alarms, [failures.counts], failures, is_first_step=True) if step == 0 else []
        if stopping := [alarm.message for alarm in alarms if alarm.stops]:
            raise AlarmError("; ".join(stopping))


async def measure(config: RolloutRunConfig) -> dict[str, float]:
    """Evaluate the configuration's model on the held-out prompts, and return the metrics.

    Raises:
        DataError: No source has held-out prompts.
    """
    config = config.with_first_width()
    async with AsyncExitStack() as stack:
        media_dir = stack.enter_context(open_media_dir(config))
        return await _measure_with_media(config, prepare(config, media_dir), media_dir, stack)


async def _measure_with_media(
    config: RolloutRunConfig, prepared: PreparedRun, media_dir: Path, stack: AsyncExitStack
) -> dict[str, float]:
    draws = prepared.data.get_evaluation_draws(config.evaluation.num_prompts)
    if not draws:
        raise DataError("no source has held-out prompts: set `held_out`, a held-out file, or a held-out split.")
    cluster = open_cluster(config.cluster, config.roles)
    stack.push_async_callback(cluster.close)
    cluster.media_dir = media_dir
    roles, _ = await start_roles(config, cluster, prepared, stack)
    generation = await open_generation(config, roles, prepared.data.renderer, stack)
    plan = build_sampling_plans(config, prepared.stop_token_ids)[1]
    groups = await generation.scheduler.collect(draws, plan)
    if text := describe_failures(count_failures(groups)):
        logger.warning("%s", text)
    return measures.compute_evaluation_metrics(groups)
