"""The pipeline of preference training: its roles, facts and evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from roll.cluster.base import Cluster
from roll.config.pipelines.preference import PreferenceConfig
from roll.pipelines.learning.losses import preference_loss
from roll.pipelines.preference.objective import Objective, kind_of
from roll.pipelines.preference.reference import all_batches, held_out_batches, reference_outputs, reference_spec
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.supervised.evaluation import held_out_metrics, measure_answers, merge_metrics, open_measuring
from roll.pipelines.supervised.frozen_outputs import compute_once, weights_name
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import facts, open_course
from roll.pipelines.supervised.output_store import OutputStore
from roll.pipelines.supervised.preparation import Prepared
from roll.running import run_in_thread

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: PreferenceConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    section, kept = config.preference, OutputStore()
    if section.method.compares_pairs:
        preference_loss(section)  # refuses invalid settings before anything starts

    async def first(cluster: Cluster, prepared: Prepared) -> None:
        nonlocal kept
        if section.method.uses_reference and section.reference == "precomputed":
            spec = reference_spec(config, prepared)
            name = await run_in_thread(weights_name, spec)
            kept = await asyncio.to_thread(OutputStore, session.directory.path / "reference" / name)
            batches = await run_in_thread(all_batches, config, prepared, session)
            await compute_once(
                cluster, spec, kept, batches, reference_outputs(config), who="the reference", session=session
            )

    async with open_course(config, session, kind_of(section), first=first) as course:
        max_tokens = course.examples.rendering.max_tokens
        objective = Objective(section=section, policy=course.policy, kept=kept, max_tokens=max_tokens)
        course.completed = objective.with_reference_logprobs
        yield partial(train, course, objective.loss)


async def _measure(config: PreferenceConfig) -> dict[str, float]:
    """Measure the configuration's model on held-out preferences, with its reference."""
    section = config.preference.model_copy(update={"reference": "precomputed"})
    config, kept = config.model_copy(update={"preference": section}), OutputStore()
    async with open_measuring(config, kind_of(section)) as measuring:
        prepared = measuring.prepared
        if section.method.uses_reference:
            batches = await asyncio.to_thread(held_out_batches, config, prepared)
            spec = reference_spec(config, prepared)
            await compute_once(measuring.cluster, spec, kept, batches, reference_outputs(config), who="the reference")
        trainer = await measuring.start("reference")
        max_tokens = prepared.examples.rendering.max_tokens
        objective = Objective(section=section, policy=trainer, kept=kept, max_tokens=max_tokens)
        batch = await objective.with_reference_logprobs(measuring.batch)
        metrics = held_out_metrics(await trainer.measure(batch, await objective.loss(batch.samples)), batch)
    return merge_metrics(metrics, await measure_answers(config))


def _facts(config: PreferenceConfig, at: RunState) -> RunFacts:
    return facts(config, at, kind_of(config.preference), config.preference.type)


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=_measure)
