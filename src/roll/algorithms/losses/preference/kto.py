"""KTO, arXiv 2402.01306: a loss on single answers labeled desirable or undesirable.

loss = mean_y { w_D [1 - sigmoid(beta (s - z0))]  desirable,   w_U [1 - sigmoid(beta (z0 - s))]  undesirable }

with s = log pi(y|x) - log ref(y|x), and z0 the reference point: the policy's divergence from the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.losses.preference.pairs import compute_sequence_scores
from roll.algorithms.pairs import compute_comparison_accuracy
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["KTOLoss", "compute_reference_point"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOLoss:
    """The KTO loss: a mean over the answers of the global batch.

    Rewards of desirable and undesirable answers are averaged separately; `preference/margin` is the difference of the
    two means. An answer is treated as accurate if it is desirable and above the reference point, or undesirable and
    below it; an answer at the reference point counts as one half.
    """

    reference_point: float
    """z0, in nats: see `compute_reference_point`. With 0, the loss is APO-zero without pairs, arXiv 2408.06266."""
    beta: float = 0.1
    desirable_weight: float = 1.0
    """Weight of desirable answers, w_D. The paper recommends w_D n_D / (w_U n_U) between 1 and 3/2, where n_D and n_U
    are the numbers of desirable and undesirable examples."""
    undesirable_weight: float = 1.0
    """Weight of undesirable answers, w_U."""
    needs = LossRequirements(whole_sequences=True)
    """The loss requires the policy's log-probs of whole sequences."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: The batch has no `preferred` column or no log-probs of the reference.
        """
        is_desirable = inputs.require("preferred")
        scores = compute_sequence_scores(inputs, mean=False, against_reference=True)
        distance = self.beta * (scores - self.reference_point)
        desirable, undesirable = torch.sigmoid(-distance), torch.sigmoid(distance)  # 1 - sigmoid(x) is sigmoid(-x)
        losses = torch.where(is_desirable, self.desirable_weight * desirable, self.undesirable_weight * undesirable)
        return LossOutputs(
            loss=losses.sum() / inputs.num_sequences,
            metrics=self._compute_metrics(inputs, is_desirable, scores.detach()),
        )

    def _compute_metrics(self, inputs: LossInputs, is_desirable: Tensor, scores: Tensor) -> dict[str, Tensor]:
        away = scores - self.reference_point
        rewards, right = self.beta * scores, compute_comparison_accuracy(torch.where(is_desirable, away, -away))
        counts = inputs.num_preferred, inputs.num_sequences - inputs.num_preferred
        chosen, rejected = (
            rewards[these].sum() / max(count, 1.0)
            for these, count in zip((is_desirable, ~is_desirable), counts, strict=True)
        )
        return {
            "preference/reward_chosen": chosen,
            "preference/reward_rejected": rejected,
            "preference/margin": chosen - rejected,
            "preference/accuracy": right.sum() / inputs.num_sequences,
            "preference/reference_point": rewards.new_tensor(
                self.reference_point * len(rewards) / inputs.num_sequences
            ),
        }


def compute_reference_point(logprobs: Sequence[float], ref_logprobs: Sequence[float]) -> float:
    """Compute KTO's reference point z0 from mismatched pairs of a prompt and an answer to another prompt.

    z0 = max(0, mean of log pi(y'|x) - log ref(y'|x)), where y' is an answer to another prompt of the batch.

    Args:
        logprobs: Total log-prob of each mismatched answer under the policy before the update.
        ref_logprobs: Total log-prob of each mismatched answer under the reference.

    Raises:
        ValueError: The sequences are empty.
    """
    if not len(logprobs):
        raise ValueError(
            "KTO's reference point requires at least one answer to a different prompt in the batch: use more prompts "
            "per batch"
        )
    pairs = zip(logprobs, ref_logprobs, strict=True)
    return max(0.0, sum(float(own) - float(other) for own, other in pairs) / len(logprobs))
