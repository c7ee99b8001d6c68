"""The pipeline of rejection sampling: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from roll.config.pipelines.rejection_sampling import RejectionSamplingConfig
from roll.pipelines.evaluation import measure
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.loop import train
from roll.pipelines.online.opening import RoleSpec, build_facts, build_policy_spec, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline
from roll.pipelines.rejection_sampling.objective import build_objective
from roll.pipelines.run import Session
from roll.running import run_in_thread

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: RejectionSamplingConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    session.tracker.note("reading the model's files and the prompts")
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    placed = [RoleSpec("actor_train", build_policy_spec(config, prepared.model_path))]
    async with open_online(config, session, prepared, placed, lambda started: Learner(policy=started[0])) as online:
        yield partial(train, online, build_objective(online))


PIPELINE = Pipeline(
    open=_open, facts=partial(build_facts, method="rejection_sampling"), evaluate=measure, state=LearningState
)
