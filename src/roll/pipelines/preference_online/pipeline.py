"""The pipeline of online preference training: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.config.pipelines.preference_online import PreferenceOnlineConfig
from roll.pipelines.evaluation import measure
from roll.pipelines.learner import BaseModelScorer, Learner
from roll.pipelines.learning.losses import build_preference_loss
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.loop import train
from roll.pipelines.online.opening import RoleSpec, build_facts, build_policy_spec, open_online
from roll.pipelines.preference_online.objective import build_objective
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.running import run_in_thread
from roll.training import TrainerSpec

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: PreferenceOnlineConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    build_preference_loss(config.preference)  # refuses invalid settings before anything starts
    session.tracker.note("reading the model's files and the prompts")
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    placed = [RoleSpec("actor_train", build_policy_spec(config, prepared.model_path))]
    if config.has_reference_role:
        placed.append(
            RoleSpec(
                "reference",
                TrainerSpec.for_frozen_model(prepared.model_path, config.model, config.training, config.seed),
            )
        )

    def build_learner(started: Sequence[Any]) -> Learner:
        policy, *own = started
        if not config.preference.method.uses_reference:
            return Learner(policy=policy)
        return Learner(policy=policy, reference=own[0] if own else BaseModelScorer(policy))

    async with open_online(config, session, prepared, placed, build_learner) as online:
        yield partial(train, online, build_objective(online))


def _build_run_facts(config: PreferenceOnlineConfig, state: RunState) -> RunFacts:
    return build_facts(config, state, f"online {config.preference.type}")


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=measure, state=LearningState)
