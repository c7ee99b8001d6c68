"""The pipeline of preference training: its roles, facts and evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from roll.cluster.base import Cluster
from roll.config.pipelines.preference import PreferenceConfig
from roll.pipelines.learning.losses import build_preference_loss
from roll.pipelines.preference.objective import PreferenceObjective, get_example_kind
from roll.pipelines.preference.reference import (
    build_held_out_batches,
    build_reference_scorer,
    build_reference_spec,
    list_batches,
)
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.supervised.evaluation import (
    compute_held_out_metrics,
    measure_answers,
    merge_metrics,
    open_evaluation,
)
from roll.pipelines.supervised.frozen_outputs import build_weights_name, compute_missing_outputs
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import build_facts, open_supervised
from roll.pipelines.supervised.output_store import OutputStore
from roll.pipelines.supervised.preparation import PreparedRun
from roll.running import run_in_thread

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: PreferenceConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    section, kept = config.preference, OutputStore()
    if section.method.compares_pairs:
        build_preference_loss(section)  # refuses invalid settings before anything starts

    async def score_with_reference(cluster: Cluster, prepared: PreparedRun) -> None:
        nonlocal kept
        if section.method.uses_reference and section.reference == "precomputed":
            spec = build_reference_spec(config, prepared)
            name = await run_in_thread(build_weights_name, spec)
            kept = await asyncio.to_thread(OutputStore, session.directory.path / "reference" / name)
            batches = await run_in_thread(list_batches, config, prepared, session)
            await compute_missing_outputs(
                cluster,
                spec,
                kept,
                batches,
                build_reference_scorer(config),
                model_name="the reference",
                session=session,
            )

    async with open_supervised(
        config, session, get_example_kind(section), before_start=score_with_reference
    ) as supervised:
        max_tokens = supervised.examples.sample_builder.max_tokens
        objective = PreferenceObjective(section=section, policy=supervised.policy, store=kept, max_tokens=max_tokens)
        supervised.add_columns = objective.add_reference_logprobs
        yield partial(train, supervised, objective.build_loss)


async def _measure(config: PreferenceConfig) -> dict[str, float]:
    """Evaluate the configured model on held-out preferences, with the log-probs of its reference model."""
    section = config.preference.model_copy(update={"reference": "precomputed"})
    config, kept = config.model_copy(update={"preference": section}), OutputStore()
    async with open_evaluation(config, get_example_kind(section)) as measuring:
        prepared = measuring.prepared
        if section.method.uses_reference:
            batches = await asyncio.to_thread(build_held_out_batches, config, prepared)
            spec = build_reference_spec(config, prepared)
            await compute_missing_outputs(
                measuring.cluster, spec, kept, batches, build_reference_scorer(config), model_name="the reference"
            )
        trainer = await measuring.start("reference")
        max_tokens = prepared.examples.sample_builder.max_tokens
        objective = PreferenceObjective(section=section, policy=trainer, store=kept, max_tokens=max_tokens)
        batch = await objective.add_reference_logprobs(measuring.batch)
        metrics = compute_held_out_metrics(
            await trainer.measure(batch, await objective.build_loss(batch.samples)), batch
        )
    return merge_metrics(metrics, await measure_answers(config))


def _build_run_facts(config: PreferenceConfig, state: RunState) -> RunFacts:
    return build_facts(config, state, get_example_kind(config.preference), config.preference.type)


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=_measure)
