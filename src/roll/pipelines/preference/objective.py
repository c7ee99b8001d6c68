"""Objective of preference training: the loss of a batch, and the columns that the loss needs before the update.

samples ─ reference's log-probs ─► batch        (stored, or of the policy without its adapters)
KTO: answers moved on to the next prompt ─ policy, reference ─► z0 ─► loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.algorithms.losses import KTOLoss, LikelihoodLoss, PreferenceLoss
from roll.algorithms.losses.preference import compute_reference_point
from roll.config.preference import PreferenceSection
from roll.data.examples import ExampleKind, truncate_tokens
from roll.pipelines.learner import BaseModelScorer
from roll.pipelines.learning.losses import build_preference_loss
from roll.pipelines.supervised.output_store import OutputStore
from roll.protocols import LossFn, TrainerGroup
from roll.types import FloatArray, TrainingBatch, TrainingSample, slice_media

__all__ = ["PreferenceObjective", "get_benchmark_loss", "get_example_kind", "mismatch_answers"]

PAIR_BENCHMARK_LOSS = PreferenceLoss(against_reference=False)
ANSWER_BENCHMARK_LOSS = LikelihoodLoss()
"""Losses with which a step is timed instead of the methods' losses, because samples have no reference log-probs
then."""


def get_benchmark_loss(section: PreferenceSection) -> LossFn:
    """Return a loss for time estimates. It needs no reference, and packs samples like the method's loss."""
    return PAIR_BENCHMARK_LOSS if section.method.compares_pairs else ANSWER_BENCHMARK_LOSS


def get_example_kind(section: PreferenceSection) -> ExampleKind:
    """Return the type of examples that a method learns from: `pair`, or `labelled` for single answers."""
    return "pair" if section.method.compares_pairs else "labelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceObjective:
    """Builds the loss of each batch, and adds the reference's log-probs to the samples."""

    section: PreferenceSection
    policy: TrainerGroup
    store: OutputStore
    """Stored log-probs of the reference, unless it is the policy without its adapters."""
    max_tokens: int | None
    """Token limit of a sample."""

    async def add_reference_logprobs(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with the reference's log-probs, if the method uses them."""
        if not self.section.method.uses_reference:
            return batch
        logprobs = await self._compute_reference_logprobs(batch)
        return replace(
            batch,
            samples=tuple(replace(s, ref_logprobs=r) for s, r in zip(batch.samples, logprobs, strict=True)),
        )

    async def build_loss(self, samples: Sequence[TrainingSample]) -> LossFn:
        """Build the loss of a batch of samples, under the policy's current weights."""
        if self.section.method.compares_pairs:
            return build_preference_loss(self.section)
        others = mismatch_answers(samples, self.max_tokens)
        return KTOLoss(reference_point=await self._compute_reference_point(others), **self.section.settings)

    async def _compute_reference_point(self, mismatched_samples: tuple[TrainingSample, ...]) -> float:
        """Compute KTO's reference point z0 from the mismatched answers `mismatched_samples`; 0 if there are none."""
        if not mismatched_samples:
            return 0.0
        batch = TrainingBatch(samples=mismatched_samples)
        own = (await self.policy.measure(batch, ANSWER_BENCHMARK_LOSS)).logprobs
        return compute_reference_point(
            _sum_logprobs(mismatched_samples, own),
            _sum_logprobs(mismatched_samples, await self._compute_reference_logprobs(batch)),
        )

    async def _compute_reference_logprobs(self, batch: TrainingBatch) -> list[FloatArray]:
        if self.section.reference == "adapters":
            return (await BaseModelScorer(self.policy).forward(batch, ("logprobs",)))["logprobs"]
        return [_scatter_loss_tokens(sample, self.store.get_rows(sample)["logprobs"]) for sample in batch.samples]


def _scatter_loss_tokens(sample: TrainingSample, logprobs: FloatArray) -> FloatArray:
    """Scatter the log-probs of loss tokens into an array [L], with zeros elsewhere."""
    result = np.zeros(len(sample), np.float32)
    result[sample.loss_mask] = logprobs
    return result


def _sum_logprobs(samples: Sequence[TrainingSample], logprobs: Sequence[FloatArray]) -> list[float]:
    """Return the log-prob of each sample's answer, which is the sum over its loss tokens."""
    return [float(p[s.loss_mask].sum(dtype=np.float64)) for s, p in zip(samples, logprobs, strict=True)]


def mismatch_answers(samples: Sequence[TrainingSample], max_tokens: int | None) -> tuple[TrainingSample, ...]:
    """Pair each prompt with the answer to the previous prompt, in a cycle; empty for a single sample.

    KTO's authors and TRL use these pairs to estimate the policy's divergence from the reference (arXiv 2402.01306,
    section 4.1).

    Args:
        samples: A batch of single answers.
        max_tokens: Token limit of a sample; longer answers are truncated.
    """
    if len(samples) < 2:
        return ()
    result = []
    for sample, other in zip(samples, (samples[-1], *samples[:-1]), strict=True):
        prompt_end, begins = int(np.argmax(sample.loss_mask)), int(np.argmax(other.loss_mask))
        ids = np.concatenate([sample.token_ids[:prompt_end], other.token_ids[begins:]])
        mask = np.concatenate([np.zeros(prompt_end, np.bool_), other.loss_mask[begins:]])
        answer_media = slice_media(other.media, begins, len(other), prompt_end)
        ids, mask, media = truncate_tokens(
            ids, mask, (*slice_media(sample.media, 0, prompt_end), *answer_media), max_tokens
        )
        result.append(
            TrainingSample(
                sample_id=f"{sample.sample_id}.other", unit=sample.unit, token_ids=ids, loss_mask=mask, media=media
            )
        )
    return tuple(result)
