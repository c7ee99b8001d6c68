"""The pipeline of on-policy distillation: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.config.pipelines.distill import DistillConfig
from roll.models import describe_model
from roll.pipelines.distill.objective import build_objective
from roll.pipelines.distill.teachers import EngineTeacher, build_teacher_specs
from roll.pipelines.evaluation import measure
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.loop import train
from roll.pipelines.online.opening import RoleSpec, build_facts, build_policy_spec, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.teachers import resolve_teachers
from roll.running import run_in_thread
from roll.training import TrainerSpec

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: DistillConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Check the teachers, start all roles, yield the training loop, and shut the roles down afterwards."""
    session.tracker.note("reading the files of student and teacher, and the prompts")
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    paths = await run_in_thread(resolve_teachers, config.teacher, config.model, prepared.model_path)
    num_tokens = [describe_model(path).vocab_size for path in paths]
    held = tuple(map(str, paths)) if config.trainer_loads_teachers else ()
    policy = build_policy_spec(config, prepared.model_path, teachers=held)
    in_engines = not held and config.teacher[0].backend == "engine"

    placed = [RoleSpec("actor_train", policy)]
    if in_engines:
        placed.append(RoleSpec("teacher", build_teacher_specs(config, prepared, paths, session.directory)))
    elif not held:
        placed += [
            RoleSpec("teacher", TrainerSpec.for_teacher(path, config.model, config.training, config.seed))
            for path in paths
        ]

    def build_learner(started: Sequence[Any]) -> Learner:
        student, *others = started
        teachers = [EngineTeacher(engine) for engine in others[0].engines] if in_engines else others
        return Learner(policy=student, teachers=tuple(teachers))

    async with open_online(config, session, prepared, placed, build_learner) as online:
        yield partial(train, online, build_objective(online, num_tokens))


def _build_run_facts(config: DistillConfig, state: RunState) -> RunFacts:
    settings = config.distillation
    return build_facts(config, state, f"{settings.divergence} divergence as a {settings.mode}")


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=measure, state=LearningState)
