"""Evaluation of a model on held-out examples, without training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from roll.cluster.base import Cluster, open_cluster
from roll.config.supervised import SupervisedConfig
from roll.data.examples import ExampleKind
from roll.errors import DataError
from roll.pipelines.evaluation import measure
from roll.pipelines.preparation import open_media_dir
from roll.pipelines.supervised.preparation import PreparedRun, build_held_out_batch, prepare
from roll.protocols import LossFn, TrainerGroup
from roll.tracking.intervals import compute_accuracy_metrics
from roll.training import Role, TrainerSpec
from roll.types import ForwardBackwardResult, TrainingBatch

__all__ = [
    "EvaluationParts",
    "compute_held_out_metrics",
    "measure_answers",
    "measure_model",
    "merge_metrics",
    "open_evaluation",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationParts:
    """The configuration, the cluster and the data of an evaluation on held-out examples."""

    config: SupervisedConfig
    cluster: Cluster
    prepared: PreparedRun
    batch: TrainingBatch
    """Batch of the held-out examples."""
    stack: AsyncExitStack

    async def start(self, role: Role, *, teachers: tuple[str, ...] = ()) -> TrainerGroup:
        """Start a frozen trainer with the configured model, and with the teachers of a distillation loss."""
        config, prepared = self.config, self.prepared
        spec = TrainerSpec.for_frozen_model(prepared.model_path, config.model, prepared.training, config.seed)
        trainer = await self.cluster.start_trainer(replace(spec, role=role, teachers=teachers), "actor_train")
        self.stack.push_async_callback(trainer.close)
        return trainer


@asynccontextmanager
async def open_evaluation(
    config: SupervisedConfig, kind: ExampleKind, *, score_at_end: bool = False
) -> AsyncIterator[EvaluationParts]:
    """Open the cluster, read the held-out batch, yield both, and close them at the end; the caller starts the model.

    Raises:
        DataError: No source has held-out examples.
    """
    async with AsyncExitStack() as stack:
        media_dir = stack.enter_context(open_media_dir(config))
        prepared = await asyncio.to_thread(prepare, config, kind, score_at_end=score_at_end, media_dir=media_dir)
        yield await _open_parts(config, prepared, media_dir, stack)


async def _open_parts(
    config: SupervisedConfig, prepared: PreparedRun, media_dir: Path, stack: AsyncExitStack
) -> EvaluationParts:
    if not prepared.examples.held_out:
        raise DataError("no source has held-out examples: set `held_out`, a held-out file, or a held-out split.")
    batch = await asyncio.to_thread(build_held_out_batch, config, prepared.examples)
    cluster = open_cluster(config.cluster, config.roles)
    stack.push_async_callback(cluster.close)
    cluster.media_dir = media_dir
    return EvaluationParts(config=config, cluster=cluster, prepared=prepared, batch=batch, stack=stack)


def compute_held_out_metrics(measured: ForwardBackwardResult, batch: TrainingBatch) -> dict[str, float]:
    """Return the loss and its metrics; the prefix of each metric is replaced by `eval/`.

    Args:
        measured: Results on the held-out examples.
        batch: Batch of the held-out examples; accuracies are averaged over loss units, such as pairs.
    """
    metrics = {name.rpartition("/")[2]: value for name, value in measured.metrics.items()}
    found = {f"eval/{name}": value for name, value in {"loss": measured.loss, **metrics}.items()}
    if "accuracy" in metrics:
        found |= compute_accuracy_metrics("eval/", metrics["accuracy"], batch.num_units)
    return {**found, "eval/num_examples": float(batch.num_units)}


def merge_metrics(example_metrics: Mapping[str, float], answer_metrics: Mapping[str, float]) -> dict[str, float]:
    """Merge the metrics of held-out examples and of answers.

    If both have a metric of the same name, the examples' metric gets the prefix `eval/examples/`.
    """
    taken = {
        k
        for k in example_metrics
        if k in answer_metrics or (k.startswith("eval/accuracy") and "eval/accuracy" in answer_metrics)
    }
    moved = {f"eval/examples/{k.removeprefix('eval/')}" if k in taken else k: v for k, v in example_metrics.items()}
    return moved | dict(answer_metrics)


async def measure_model(
    config: SupervisedConfig, *, kind: ExampleKind, loss: LossFn, role: Role = "reference", score_at_end: bool = False
) -> dict[str, float]:
    """Compute the loss and its metrics, as `eval/…`, for the configuration's model on held-out examples.

    Raises:
        DataError: No source has held-out examples.
    """
    async with open_evaluation(config, kind, score_at_end=score_at_end) as measuring:
        trainer = await measuring.start(role)
        metrics = compute_held_out_metrics(await trainer.measure(measuring.batch, loss), measuring.batch)
    return merge_metrics(metrics, await measure_answers(config))


async def measure_answers(config: SupervisedConfig) -> dict[str, float]:
    """Return metrics of the answers that engines generate with the model; empty without `evaluation.answers`."""
    answering = config.build_prompt_run_config()
    return {} if answering is None else await measure(answering)
