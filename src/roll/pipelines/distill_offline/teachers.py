"""Teacher outputs for given answers: teachers score each sample once, and the result is passed to the loss with the
sample.

kept   remaining draws, held-out examples ─ each source's teacher, frozen ─► top-k tokens, on disk ─► samples
loss   index of the sample's teacher ─► samples; the student's trainer loads all teachers
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from roll.cluster.base import Cluster
from roll.config.pipelines.distill_offline import DistillOfflineConfig
from roll.errors import ModelError
from roll.models import describe_model
from roll.pipelines.run import Session
from roll.pipelines.supervised.frozen_outputs import CHUNK_SIZE, build_weights_name, compute_missing_outputs
from roll.pipelines.supervised.output_store import OutputStore, Rows, build_rows
from roll.pipelines.supervised.preparation import PreparedRun
from roll.protocols import TrainerGroup
from roll.running import run_in_thread
from roll.training import TrainerSpec
from roll.types import ForwardOptions, TopLogprobs, TrainingBatch, TrainingSample

__all__ = ["TeacherOutputs", "compute_teacher_outputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherOutputs:
    """The teachers' outputs: either stored, or computed by the student's trainer, which then loads the teachers."""

    teacher_by_domain: dict[str, int]
    """Index of the teacher by domain."""
    stores: tuple[OutputStore, ...] = ()
    """Stored outputs of each teacher; empty if the student's trainer loads the teachers."""

    async def add_teacher_columns(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with each sample's stored teacher outputs or, if none are stored, the teacher's index."""
        return replace(batch, samples=tuple(map(self._add_columns_to_sample, batch.samples)))

    def _add_columns_to_sample(self, sample: TrainingSample) -> TrainingSample:
        teacher = self.teacher_by_domain[sample.domain]
        if not self.stores:
            return replace(sample, teacher=teacher)
        rows = self.stores[teacher].get_rows(sample)
        shape = len(sample), *rows["logprobs"].shape[1:]
        top = TopLogprobs(token_ids=np.zeros(shape, np.int32), logprobs=np.zeros(shape, np.float32))
        top.token_ids[sample.loss_mask], top.logprobs[sample.loss_mask] = rows["token_ids"], rows["logprobs"]
        return replace(sample, teacher_top=top)


async def compute_teacher_outputs(
    config: DistillOfflineConfig,
    prepared: PreparedRun,
    cluster: Cluster,
    paths: Sequence[Path],
    samples: Sequence[TrainingSample],
    session: Session | None = None,
) -> TeacherOutputs:
    """Compute and store all missing outputs, one teacher after the other; return all outputs.

    Args:
        config: Configuration of the run.
        prepared: Prepared data of the run.
        cluster: Cluster on which teachers are started.
        paths: Model paths of the teachers.
        samples: Samples to score, each by the teacher of its domain.
        session: Session that shows the progress. Without a session, outputs are kept in memory, unless
            `distillation.directory` is set.
    """
    settings, rows = config.distillation, describe_model(prepared.model_path).vocab_size
    directory = session.directory.path / "teacher" if session else None
    if settings.directory is not None:
        directory = Path(settings.directory)
    stores = []
    for number, path in enumerate(paths):
        spec = TrainerSpec.for_teacher(path, config.model, prepared.training, config.seed)
        name = f"{await run_in_thread(build_weights_name, spec)}-top{settings.top_k}"
        store = await asyncio.to_thread(OutputStore, directory / name if directory else None)
        own = [sample for sample in samples if config.teacher_by_domain[sample.domain] == number]
        model = config.teacher[number].model

        async def score(teacher: TrainerGroup, batch: TrainingBatch, model: str = model) -> list[Rows]:
            outputs = await teacher.forward(batch, ("top_logprobs",), ForwardOptions(num_top=settings.top_k))
            pairs = zip(batch.samples, outputs["top_logprobs"], strict=True)
            return [_select_loss_token_rows(sample, top, rows, model) for sample, top in pairs]

        batches = [own[start : start + CHUNK_SIZE] for start in range(0, len(own), CHUNK_SIZE)]
        await compute_missing_outputs(
            cluster, spec, store, batches, score, model_name=f"the teacher '{model}'", session=session
        )
        stores.append(store)
    return TeacherOutputs(teacher_by_domain=config.teacher_by_domain, stores=tuple(stores))


def _select_loss_token_rows(sample: TrainingSample, top: TopLogprobs, num_tokens: int, model: str) -> Rows:
    """Return the top-k tokens and log-probs at the positions in the loss mask, with ids in the smallest integer dtype.

    Raises:
        ModelError: A top-k token is not among the student's `num_tokens` tokens; `model` names the teacher.
    """
    ids = top.token_ids[sample.loss_mask]
    if ids.size and ids.max() >= num_tokens:
        raise ModelError(
            f"token {ids.max():,} is among the top-k tokens of teacher.model '{model}', but the student's vocabulary "
            f"has only {num_tokens:,} tokens: lower distillation.top_k, or resize the teacher's vocabulary to the "
            "student's."
        )
    return build_rows(token_ids=ids.astype(np.min_scalar_type(num_tokens - 1)), logprobs=top.logprobs[sample.loss_mask])
