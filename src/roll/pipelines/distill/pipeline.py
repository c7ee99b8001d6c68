"""The pipeline of on-policy distillation: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.config.pipelines.distill import DistillConfig
from roll.models import describe_model
from roll.pipelines.distill.objective import objective
from roll.pipelines.distill.teachers import EngineTeacher, teacher_engines
from roll.pipelines.evaluation import measure
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.loop import train
from roll.pipelines.online.opening import RoleSpec, facts, open_online, policy_spec
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.teachers import teacher_paths
from roll.running import run_in_thread
from roll.training import TrainerSpec

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: DistillConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start every role; teachers are checked before any role starts."""
    session.tracker.note("reading the files of student and teacher, and the prompts")
    prepared = await run_in_thread(prepare, config)
    paths = await run_in_thread(teacher_paths, config.teacher, config.model, prepared.model_path)
    num_tokens = [describe_model(path).vocab_size for path in paths]
    held = tuple(map(str, paths)) if config.trainer_holds_teachers else ()
    policy = policy_spec(config, prepared.model_path, teachers=held)
    in_engines = not held and config.teacher[0].place == "engine"

    placed = [RoleSpec("actor_train", policy)]
    if in_engines:
        placed.append(RoleSpec("teacher", teacher_engines(config, prepared, paths, session.directory)))
    elif not held:
        placed += [
            RoleSpec("teacher", TrainerSpec.teacher(path, config.model, config.training, config.seed)) for path in paths
        ]

    def learner_of(started: Sequence[Any]) -> Learner:
        student, *others = started
        teachers = [EngineTeacher(engine) for engine in others[0].engines] if in_engines else others
        return Learner(policy=student, teachers=tuple(teachers))

    async with open_online(config, session, prepared, placed, learner_of) as online:
        yield partial(train, online, objective(online, num_tokens))


def _facts(config: DistillConfig, at: RunState) -> RunFacts:
    settings = config.distillation
    return facts(config, at, f"{settings.divergence} divergence as a {settings.place}")


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=measure, state=LearningState)
