"""The pipeline of offline distillation: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from roll.cluster.base import Cluster
from roll.config.pipelines.distill_offline import DistillOfflineConfig
from roll.config.supervised import SupervisedConfig
from roll.models import resolve_model
from roll.pipelines.distill_offline.losses import offline_loss
from roll.pipelines.distill_offline.paths import teachers_of
from roll.pipelines.distill_offline.teachers import TeacherOutputs, compute_teacher_outputs
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.supervised.evaluation import held_out_metrics, measure_answers, merge_metrics, open_measuring
from roll.pipelines.supervised.frozen_outputs import remaining_steps
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import facts, open_course
from roll.pipelines.supervised.preparation import Prepared, held_out_batch, policy_spec
from roll.running import run_in_thread
from roll.training import TrainerSpec
from roll.types import TrainingSample

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: DistillOfflineConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start every role; teachers are checked before any role starts."""
    paths = await run_in_thread(lambda: teachers_of(config, resolve_model(config.model.path)))
    held = tuple(map(str, paths)) if config.trainer_holds_teachers else ()
    taught = TeacherOutputs(teacher_of=config.teacher_of)

    async def first(cluster: Cluster, prepared: Prepared) -> None:
        nonlocal taught
        if not held:
            samples = await run_in_thread(_all_samples, config, prepared, session)
            taught = await compute_teacher_outputs(config, prepared, cluster, paths, samples, session)

    def student(config: SupervisedConfig, prepared: Prepared) -> TrainerSpec:
        return replace(policy_spec(config, prepared), teachers=held)

    async with open_course(config, session, "supervised", spec_of=student, first=first) as course:
        course.completed = taught.with_teacher_columns
        yield partial(train, course, offline_loss(config.distillation))


def _all_samples(config: DistillOfflineConfig, prepared: Prepared, session: Session) -> Sequence[TrainingSample]:
    """Return all samples that the teachers will score: the remaining draws and the held-out examples."""
    drawn = [sample for samples in remaining_steps(prepared, session) for sample in samples]
    return [*drawn, *held_out_batch(config, prepared.examples).samples]


async def _measure(config: DistillOfflineConfig) -> dict[str, float]:
    """Measure the divergence of the configuration's model from its teachers on held-out examples."""
    paths = await run_in_thread(lambda: teachers_of(config, resolve_model(config.model.path)))
    held = tuple(map(str, paths)) if config.trainer_holds_teachers else ()
    async with open_measuring(config, "supervised") as measuring:
        taught = TeacherOutputs(teacher_of=config.teacher_of)
        if not held:
            taught = await compute_teacher_outputs(
                config, measuring.prepared, measuring.cluster, paths, measuring.batch.samples
            )
        trainer = await measuring.start("reference", teachers=held)
        batch = await taught.with_teacher_columns(measuring.batch)
        metrics = held_out_metrics(await trainer.measure(batch, offline_loss(config.distillation)), batch)
    return merge_metrics(metrics, await measure_answers(config))


def _facts(config: DistillOfflineConfig, at: RunState) -> RunFacts:
    return facts(config, at, "supervised", config.distillation.method)


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=_measure)
