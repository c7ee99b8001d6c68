"""Teachers that compute log-probs of the student's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from roll.config.pipelines.distill import DistillConfig
from roll.errors import InfraError
from roll.inference import EngineSpec
from roll.pipelines.preparation import PreparedRun, build_engine_specs
from roll.protocols import InferenceEngine, Scorer
from roll.tracking import RunDirectory
from roll.types import FloatArray, OutputName, Outputs, Rollout, TrainingBatch

__all__ = ["EngineTeacher", "build_teacher_specs", "compute_teacher_logprobs"]


def build_teacher_specs(
    config: DistillConfig, prepared: PreparedRun, paths: Sequence[Path], run: RunDirectory
) -> list[EngineSpec]:
    """Return one engine spec per teacher, with the settings of the student's engines."""
    like = replace(build_engine_specs(config, prepared, run)[0], sleeps=False)
    return [
        replace(like, engine_id=f"teacher-{i}", model_path=str(path), log_path=run.get_log_path("teacher", i))
        for i, path in enumerate(paths)
    ]


class EngineTeacher:
    """A teacher that runs in an inference engine; implements `Scorer`."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[OutputName, list[Any]]:
        """Compute log-probs at temperature 1; engines support no other output. See `Scorer.forward`.

        Raises:
            InfraError: A log-prob is not finite.
        """
        assert set(outputs) == {"logprobs"} and batch.temperature == 1.0, "the configuration was checked"
        logprobs = await self._engine.logprobs(
            [sample.token_ids for sample in batch.samples], [sample.media for sample in batch.samples]
        )
        for sample, row in zip(batch.samples, logprobs, strict=True):
            if not np.isfinite(row).all():
                raise InfraError(
                    f"engine '{self._engine.engine_id}' returned log-probs that are not finite for the "
                    f"{len(row)} tokens of rollout {sample.sample_id}: check the teacher's weights, and remove "
                    "speculative decoding from inference.options."
                )
        return {"logprobs": logprobs}


async def compute_teacher_logprobs(
    teachers: Sequence[Scorer], teacher_by_domain: Mapping[str, int], batch: TrainingBatch, rollouts: Sequence[Rollout]
) -> list[FloatArray]:
    """Compute the log-probs [L] of each sample's tokens under the teacher of the sample's domain.

    Args:
        teachers: All teachers.
        teacher_by_domain: The index in `teachers` of each domain's teacher.
        batch: The batch of samples.
        rollouts: The rollout of each sample.
    """
    places = [
        [i for i, r in enumerate(rollouts) if teacher_by_domain[r.prompt.domain] == t] for t in range(len(teachers))
    ]
    parts = [replace(batch, samples=tuple(batch.samples[i] for i in own)) for own in places]
    requests = (t.forward(part, ["logprobs"]) for t, part in zip(teachers, parts, strict=True) if part.samples)
    outputs = await asyncio.gather(*requests)
    order = [i for own in places for i in own]
    columns = [column for part in outputs for column in part["logprobs"]]
    return [column for _, column in sorted(zip(order, columns, strict=True), key=lambda pair: pair[0])]
