"""Your own pipeline: the model learns to write the longest answers.

    roll train examples/own_pipeline.yaml

The pipeline trains on the likelihood of the longest answers of each group. Everything else works like ROLL's pipelines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.algorithms.answer_selection import AnswerSelection
from roll.algorithms.losses import LikelihoodLoss
from roll.config.base import option
from roll.config.online import OnlineConfig
from roll.data.samples import build_batch
from roll.pipelines.evaluation import measure
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.answers import AnswersObjective
from roll.pipelines.online.check.inspection import inspect_run
from roll.pipelines.online.loop import train
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.online.opening import RoleSpec, build_facts, build_policy_spec, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.preflight import Report
from roll.running import run_in_thread
from roll.types import Rollout, TrainingBatch


class LongestConfig(OnlineConfig):
    """The configuration of a run that learns to write the longest answers."""

    num_kept: int = option(1, "Number of answers of each group that are trained, the longest first.", ge=1)


class Longest:
    """The pipeline: its configuration class, its state, and its training."""

    config = LongestConfig
    state = LearningState
    evaluate = staticmethod(measure)

    def check(self, config: LongestConfig) -> Report:
        """Return the report of `roll check`."""
        return inspect_run(config, "longest")

    def facts(self, config: LongestConfig, at: RunState) -> RunFacts:
        """Return the run's facts, among them its name and its number of steps."""
        return build_facts(config, at, "longest")

    @asynccontextmanager
    async def open(self, config: LongestConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Start the policy's trainer and engines, and yield a coroutine function that trains."""
        prepared = await run_in_thread(prepare, config)
        placed = [RoleSpec("actor_train", build_policy_spec(config, prepared.model_path))]
        async with open_online(config, session, prepared, placed, lambda started: Learner(policy=started[0])) as online:
            yield partial(train, online, _objective(online))


def _objective(online: OnlineRun[LongestConfig, Any]) -> AnswersObjective:
    rollout, num_kept = online.config.rollout, online.config.num_kept

    def choose(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, ...]]:
        best = sorted(rollouts, key=lambda rollout: -len(rollout.token_ids))
        return [(rollout,) for rollout in best[:num_kept]]

    async def build(choice: AnswerSelection) -> TrainingBatch:
        return build_batch(choice.rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)

    return AnswersObjective(online=online, choose=choose, build=build, loss=LikelihoodLoss())
