"""From a configuration to a course, and the end of its roles in reverse order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from roll.cluster.base import Cluster, open_cluster, start_together
from roll.config.supervised import SupervisedConfig
from roll.data.examples import ExampleKind
from roll.pipelines.learner import Learner
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Run, Session, beginning
from roll.pipelines.start_notes import StartNotes
from roll.pipelines.state import RunState
from roll.pipelines.supervised.answers import open_answers
from roll.pipelines.supervised.course import Course
from roll.pipelines.supervised.preparation import Prepared, planned_steps, prepare
from roll.protocols import TrainerGroup
from roll.training import Schedule, TrainerSpec

__all__ = ["facts", "open_course", "policy_spec"]


def policy_spec(config: SupervisedConfig, prepared: Prepared) -> TrainerSpec:
    """What is trained, seen from its only rank."""
    return TrainerSpec(
        model_path=str(prepared.model_path),
        model=config.model,
        training=prepared.training,
        schedule=Schedule.of(prepared.training),
        seed=config.seed,
    )


def _only_policy(config: SupervisedConfig, prepared: Prepared) -> list[TrainerSpec]:
    return [policy_spec(config, prepared)]


def _no_reference(trainers: Sequence[TrainerGroup]) -> Learner:
    return Learner(policy=trainers[0], critics=(), reference=None)


@asynccontextmanager
async def open_course(
    config: SupervisedConfig,
    session: Session,
    kind: ExampleKind,
    *,
    specs: Callable[[SupervisedConfig, Prepared], Sequence[TrainerSpec]] = _only_policy,
    learner_of: Callable[[Sequence[TrainerGroup]], Learner] = _no_reference,
    first: Callable[[Cluster, Prepared], Awaitable[None]] | None = None,
    score_at_end: bool = False,
) -> AsyncIterator[Course]:
    """Start every role, restore what a checkpoint holds, and end every role afterwards, also after an error.

    Args:
        config: of the run.
        session: what this process works with.
        kind: of the examples that are learnt from.
        specs: the trainers; the first is the one that learns.
        learner_of: these, in order, once they have started.
        first: is waited for before they start.
        score_at_end: see `build_examples`.
    """
    tracker, saved = session.tracker, session.saved
    tracker.note("reading the model's files and the examples")
    at = saved.state if saved else RunState()
    prepared = await asyncio.to_thread(prepare, config, kind, at, score_at_end=score_at_end)
    state = beginning(saved, prepared.examples.train)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        if first is not None:
            await first(cluster, prepared)
        notes = StartNotes(tracker.note)
        starting = [
            notes.of(f"trainer ({spec.role})", cluster.start_trainer(spec, _device_role(spec)))
            for spec in specs(config, prepared)
        ]
        learner = learner_of(await start_together(stack, *starting))
        if saved is not None:
            tracker.note(f"loading the checkpoint of step {state.step}")
            await learner.load(saved)
        stream, num_steps = prepared.examples.train, prepared.training.num_steps
        run = Run.of(config, num_steps, session, state, stream, learner.policy)
        answering, answers = config.answering(), None
        if answering is not None:
            answers = await open_answers(answering, session, cluster, run, learner.policy, stack)
            run.checkpointer.before_writing = partial(answers.live.hand_to_trainers, run)
        yield Course(
            config=config,
            training=prepared.training,
            run=run,
            learner=learner,
            examples=prepared.examples,
            answers=answers,
        )


def _device_role(spec: TrainerSpec) -> str:
    return "reference" if spec.role == "reference" else "actor_train"


def facts(config: SupervisedConfig, at: RunState, kind: ExampleKind, method: str) -> RunFacts:
    """What is said of a run that stands there."""
    ranks, cores = config.roles["actor_train"].count, os.cpu_count() or 1
    where = f"{config.cluster.type}: {ranks} trainer rank{'s' * (ranks != 1)}, {cores} core{'s' * (cores != 1)}"
    return RunFacts(method=method, where=where, num_steps=planned_steps(config, kind, at))
