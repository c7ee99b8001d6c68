"""A pipeline of your own: learn to write the longest answers.

    roll train examples/own_pipeline.yaml

Of each group it trains on the longest answers, by their likelihood; all else is as in the pipelines of ROLL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.algorithms.choosing import Choice
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
from roll.pipelines.online.opening import RoleSpec, facts, open_online, policy_spec
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.preflight import Report
from roll.running import run_in_thread
from roll.types import Rollout, TrainingBatch


class LongestConfig(OnlineConfig):
    """Learning to write the longest answers."""

    num_kept: int = option(1, "How many answers of each group are trained on, the longest first.", ge=1)


class Longest:
    """The pipeline: what runs of it are configured by, remember, and do."""

    config = LongestConfig
    state = LearningState
    evaluate = staticmethod(measure)

    def check(self, config: LongestConfig) -> Report:
        """Find out all that can be known before a run."""
        return inspect_run(config, "longest")

    def facts(self, config: LongestConfig, at: RunState) -> RunFacts:
        """Say what is learned, and where."""
        return facts(config, at, "longest")

    @asynccontextmanager
    async def open(self, config: LongestConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Start the policy's trainer and engines; inside, what is to be done."""
        prepared = await run_in_thread(prepare, config)
        placed = [RoleSpec("actor_train", policy_spec(config, prepared.model_path))]
        async with open_online(config, session, prepared, placed, lambda started: Learner(policy=started[0])) as online:
            yield partial(train, online, _objective(online))


def _objective(online: OnlineRun[LongestConfig, Any]) -> AnswersObjective:
    rollout, num_kept = online.config.rollout, online.config.num_kept

    def choose(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, ...]]:
        best = sorted(rollouts, key=lambda rollout: -len(rollout.token_ids))
        return [(rollout,) for rollout in best[:num_kept]]

    async def build(choice: Choice) -> TrainingBatch:
        return build_batch(choice.rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)

    return AnswersObjective(online=online, choose=choose, build=build, loss=LikelihoodLoss())
