"""Objective of preference training: the loss of a batch, and the columns that the loss needs before the update.

samples ─ reference's log-probs ─► batch        (stored, or of the policy without its adapters)
KTO: answers moved on to the next prompt ─ policy, reference ─► z0 ─► loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.algorithms.losses import KTOLoss, LikelihoodLoss, PreferenceLoss
from roll.algorithms.losses.preference import reference_point
from roll.config.preference import PreferenceSection
from roll.data.examples import ExampleKind
from roll.pipelines.learner import WithoutAdapters
from roll.pipelines.learning.losses import preference_loss
from roll.pipelines.supervised.output_store import OutputStore
from roll.protocols import LossFn, TrainerGroup
from roll.types import FloatArray, TrainingBatch, TrainingSample

__all__ = ["Objective", "kind_of", "packed_loss_spec", "with_other_answers"]

LIKE_PAIRS = PreferenceLoss(against_reference=False)
LIKE_ANSWERS = LikelihoodLoss()
"""Losses that stand in for the methods when a step is timed, since samples have no reference log-probs then."""


def packed_loss_spec(section: PreferenceSection) -> LossFn:
    """Return a loss that needs no reference and makes a trainer pack samples as the method's loss does."""
    return LIKE_PAIRS if section.method.compares_pairs else LIKE_ANSWERS


def kind_of(section: PreferenceSection) -> ExampleKind:
    """Return the kind of a method's examples."""
    return "pair" if section.method.compares_pairs else "labelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss of each batch."""

    section: PreferenceSection
    policy: TrainerGroup
    kept: OutputStore
    """Stored log-probs of the reference, unless it is the policy without its adapters."""
    max_tokens: int | None
    """Token limit of a sample."""

    async def with_reference_logprobs(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with the reference's log-probs, if the method uses them."""
        if not self.section.method.uses_reference:
            return batch
        said = await self._reference(batch)
        return replace(
            batch,
            samples=tuple(replace(s, ref_logprobs=r) for s, r in zip(batch.samples, said, strict=True)),
        )

    async def loss(self, samples: Sequence[TrainingSample]) -> LossFn:
        """Build the loss of a batch of samples, under the policy's current weights."""
        if self.section.method.compares_pairs:
            return preference_loss(self.section)
        others = with_other_answers(samples, self.max_tokens)
        return KTOLoss(reference_point=await self._reference_point(others), **self.section.settings)

    async def _reference_point(self, others: tuple[TrainingSample, ...]) -> float:
        """Compute z0 of KTO; 0 if there is no mismatched answer."""
        if not others:
            return 0.0
        batch = TrainingBatch(samples=others)
        own = (await self.policy.measure(batch, LIKE_ANSWERS)).logprobs
        return reference_point(_sums(others, own), _sums(others, await self._reference(batch)))

    async def _reference(self, batch: TrainingBatch) -> list[FloatArray]:
        if self.section.reference == "adapters":
            return (await WithoutAdapters(self.policy).forward(batch, ("logprobs",)))["logprobs"]
        return [_spread(sample, self.kept.of(sample)["logprobs"]) for sample in batch.samples]


def _spread(sample: TrainingSample, logprobs: FloatArray) -> FloatArray:
    """Scatter the log-probs of loss tokens into an array [L], with zeros elsewhere."""
    result = np.zeros(len(sample), np.float32)
    result[sample.loss_mask] = logprobs
    return result


def _sums(samples: Sequence[TrainingSample], logprobs: Sequence[FloatArray]) -> list[float]:
    """Return the log-probs of whole answers."""
    return [float(p[s.loss_mask].sum(dtype=np.float64)) for s, p in zip(samples, logprobs, strict=True)]


def with_other_answers(samples: Sequence[TrainingSample], max_tokens: int | None) -> tuple[TrainingSample, ...]:
    """Pair every prompt with the answer to the previous prompt, the first with the last; empty for a single sample.

    KTO's authors, and TRL, estimate the divergence of the policy from the reference in this way: arXiv 2402.01306
    section 4.1.

    Args:
        samples: A batch of single answers.
        max_tokens: Token limit of a sample; the end of a longer answer is cut off.
    """
    if len(samples) < 2:
        return ()
    result = []
    for sample, other in zip(samples, (samples[-1], *samples[:-1]), strict=True):
        asked, begins = int(np.argmax(sample.loss_mask)), int(np.argmax(other.loss_mask))
        ids = np.concatenate([sample.token_ids[:asked], other.token_ids[begins:]])[:max_tokens]
        mask = np.concatenate([np.zeros(asked, np.bool_), other.loss_mask[begins:]])[:max_tokens]
        result.append(
            TrainingSample(sample_id=f"{sample.sample_id}.other", unit=sample.unit, token_ids=ids, loss_mask=mask)
        )
    return tuple(result)
