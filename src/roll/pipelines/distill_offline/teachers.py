"""Teacher outputs for given answers: teachers score each sample once, and the loss gets the result with the sample.

kept   remaining draws, held-out examples ─ each source's teacher, frozen ─► top-k tokens, on disk ─► samples
loss   the number of its teacher ─► samples; the student's trainer holds all teachers
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
from roll.pipelines.supervised.frozen_outputs import CHUNK, compute_once, weights_name
from roll.pipelines.supervised.output_store import OutputStore, Rows, rows_of
from roll.pipelines.supervised.preparation import Prepared
from roll.protocols import TrainerGroup
from roll.running import run_in_thread
from roll.training import TrainerSpec
from roll.types import ForwardOptions, TopLogprobs, TrainingBatch, TrainingSample

__all__ = ["TeacherOutputs", "compute_teacher_outputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherOutputs:
    """Stored teacher outputs, or the indices of teachers that the trainer holds."""

    teacher_of: dict[str, int]
    """Index of the teacher by domain."""
    kept: tuple[OutputStore, ...] = ()
    """Stored outputs of each teacher; empty if the student's trainer holds the teachers."""

    async def with_teacher_columns(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with the teacher columns that the loss needs."""
        return replace(batch, samples=tuple(map(self._of, batch.samples)))

    def _of(self, sample: TrainingSample) -> TrainingSample:
        teacher = self.teacher_of[sample.domain]
        if not self.kept:
            return replace(sample, teacher=teacher)
        rows = self.kept[teacher].of(sample)
        shape = len(sample), *rows["logprobs"].shape[1:]
        top = TopLogprobs(token_ids=np.zeros(shape, np.int32), logprobs=np.zeros(shape, np.float32))
        top.token_ids[sample.loss_mask], top.logprobs[sample.loss_mask] = rows["token_ids"], rows["logprobs"]
        return replace(sample, teacher_top=top)


async def compute_teacher_outputs(
    config: DistillOfflineConfig,
    prepared: Prepared,
    cluster: Cluster,
    paths: Sequence[Path],
    samples: Sequence[TrainingSample],
    session: Session | None = None,
) -> TeacherOutputs:
    """Score the samples of each teacher that are not stored yet, one teacher after the other.

    Args:
        config: Configuration of the run.
        prepared: Prepared data of the run.
        cluster: Cluster on which teachers are started.
        paths: Model paths of the teachers.
        samples: Samples to score.
        session: Session that shows the progress; without one, outputs are only stored in a configured directory.
    """
    settings, rows = config.distillation, describe_model(prepared.model_path).vocab_size
    directory = session.directory.path / "teacher" if session else None
    if settings.directory is not None:
        directory = Path(settings.directory)
    all_kept = []
    for number, path in enumerate(paths):
        spec = TrainerSpec.teacher(path, config.model, prepared.training, config.seed)
        name = f"{await run_in_thread(weights_name, spec)}-top{settings.top_k}"
        kept = await asyncio.to_thread(OutputStore, directory / name if directory else None)
        own = [sample for sample in samples if config.teacher_of[sample.domain] == number]
        model = config.teacher[number].model

        async def ask(teacher: TrainerGroup, batch: TrainingBatch, model: str = model) -> list[Rows]:
            said = await teacher.forward(batch, ("top_logprobs",), ForwardOptions(num_top=settings.top_k))
            pairs = zip(batch.samples, said["top_logprobs"], strict=True)
            return [_loss_token_rows(sample, top, rows, model) for sample, top in pairs]

        batches = [own[start : start + CHUNK] for start in range(0, len(own), CHUNK)]
        await compute_once(cluster, spec, kept, batches, ask, who=f"the teacher '{model}'", session=session)
        all_kept.append(kept)
    return TeacherOutputs(teacher_of=config.teacher_of, kept=tuple(all_kept))


def _loss_token_rows(sample: TrainingSample, top: TopLogprobs, num_tokens: int, model: str) -> Rows:
    """Return the top-k rows of the tokens that the loss counts, in the smallest sufficient dtype.

    Raises:
        ModelError: A top-k token is not in the student's vocabulary.
    """
    ids = top.token_ids[sample.loss_mask]
    if ids.size and ids.max() >= num_tokens:
        raise ModelError(
            f"teacher.model '{model}' finds token {ids.max():,} likely, but the student predicts {num_tokens:,} "
            "tokens: lower distillation.top_k, or resize the teacher's vocabulary to the student's."
        )
    return rows_of(token_ids=ids.astype(np.min_scalar_type(num_tokens - 1)), logprobs=top.logprobs[sample.loss_mask])
