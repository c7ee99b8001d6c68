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
from roll.pipelines.distill_offline.losses import build_offline_loss
from roll.pipelines.distill_offline.paths import resolve_offline_teachers
from roll.pipelines.distill_offline.teachers import TeacherOutputs, compute_teacher_outputs
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.supervised.evaluation import (
    compute_held_out_metrics,
    measure_answers,
    merge_metrics,
    open_evaluation,
)
from roll.pipelines.supervised.frozen_outputs import list_remaining_steps
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import build_facts, open_supervised
from roll.pipelines.supervised.preparation import PreparedRun, build_held_out_batch, build_policy_spec
from roll.running import run_in_thread
from roll.training import TrainerSpec
from roll.types import TrainingSample

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: DistillOfflineConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Check the teachers, start all roles, yield the training loop, and shut the roles down afterwards."""
    paths = await run_in_thread(lambda: resolve_offline_teachers(config, resolve_model(config.model.path)))
    held = tuple(map(str, paths)) if config.trainer_loads_teachers else ()
    taught = TeacherOutputs(teacher_by_domain=config.teacher_by_domain)

    async def score_with_teachers(cluster: Cluster, prepared: PreparedRun) -> None:
        nonlocal taught
        if not held:
            samples = await run_in_thread(_list_samples, config, prepared, session)
            taught = await compute_teacher_outputs(config, prepared, cluster, paths, samples, session)

    def build_student_spec(config: SupervisedConfig, prepared: PreparedRun) -> TrainerSpec:
        return replace(build_policy_spec(config, prepared), teachers=held)

    async with open_supervised(
        config, session, "supervised", build_spec=build_student_spec, before_start=score_with_teachers
    ) as supervised:
        supervised.add_columns = taught.add_teacher_columns
        yield partial(train, supervised, build_offline_loss(config.distillation))


def _list_samples(config: DistillOfflineConfig, prepared: PreparedRun, session: Session) -> Sequence[TrainingSample]:
    """Return all samples that the teachers will score: samples of the remaining steps, and held-out examples."""
    drawn = [sample for samples in list_remaining_steps(prepared, session) for sample in samples]
    return [*drawn, *build_held_out_batch(config, prepared.examples).samples]


async def _measure(config: DistillOfflineConfig) -> dict[str, float]:
    """Evaluate the configured model: its divergence from the teachers on held-out examples and, with
    `evaluation.answers`, the answers that engines generate with it.
    """
    paths = await run_in_thread(lambda: resolve_offline_teachers(config, resolve_model(config.model.path)))
    held = tuple(map(str, paths)) if config.trainer_loads_teachers else ()
    async with open_evaluation(config, "supervised") as measuring:
        taught = TeacherOutputs(teacher_by_domain=config.teacher_by_domain)
        if not held:
            taught = await compute_teacher_outputs(
                config, measuring.prepared, measuring.cluster, paths, measuring.batch.samples
            )
        trainer = await measuring.start("reference", teachers=held)
        batch = await taught.add_teacher_columns(measuring.batch)
        metrics = compute_held_out_metrics(await trainer.measure(batch, build_offline_loss(config.distillation)), batch)
    return merge_metrics(metrics, await measure_answers(config))


def _build_run_facts(config: DistillOfflineConfig, state: RunState) -> RunFacts:
    return build_facts(config, state, "supervised", config.distillation.method)


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=_measure)
