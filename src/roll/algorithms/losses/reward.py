"""Losses of a reward model, whose score of a sequence is the value of the state after its last token.

Each sequence has one loss token, a dummy token after the last one, so that `values` [N] are the sequences' scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.algorithms.pairs import compute_comparison_accuracy, find_pairs, get_pair_margins
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["BradleyTerryLoss", "RegressionLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BradleyTerryLoss:
    """The pairwise loss of a reward model, -log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2.

    The loss is averaged over the pairs of the global batch. r_w and r_l are the scores of the preferred and the
    rejected answer.

    The first term is InstructGPT's loss, arXiv 2203.02155 eq. 1. The margin m is a pair's `target`, as in Llama 2,
    arXiv 2307.09288 eq. 2. The second term centers the scores around 0, as in arXiv 2312.09244.
    """

    centering: float = 0.0
    """Coefficient c of the centering term; TRL recommends 0.01."""
    needs = LossRequirements(whole_units=True)
    """The loss requires both answers of a pair in one micro-batch."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: A loss unit does not have two sequences, or the network does not return one value per sequence.
        """
        scores, pairs = _collect_scores(inputs), find_pairs(inputs)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        margins = get_pair_margins(inputs, pairs)
        difference = chosen - rejected
        losses = -logsigmoid(difference if margins is None else difference - margins)
        if self.centering:
            losses = losses + self.centering * (chosen + rejected).square()
        sums = {
            "reward_model/chosen": chosen.sum(),
            "reward_model/rejected": rejected.sum(),
            "reward_model/margin": difference.sum(),
            "reward_model/accuracy": compute_comparison_accuracy(difference).sum(),
        }
        metrics = {name: value.detach() / inputs.num_units for name, value in sums.items()}
        return LossOutputs(loss=losses.sum() / inputs.num_units, metrics=metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionLoss:
    """The squared error of scores against target scores, averaged over the sequences of the global batch."""

    needs = LossRequirements()
    """Only the values of a critic are needed."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: Targets are missing, or the network does not return one value for each sequence.
        """
        scores, targets = _collect_scores(inputs), inputs.require("targets")
        error = scores - targets
        sums = {
            "reward_model/value": scores.sum(),
            "reward_model/target": targets.sum(),
            "reward_model/absolute_error": error.abs().sum(),
        }
        metrics = {name: value.detach() / inputs.num_sequences for name, value in sums.items()}
        return LossOutputs(loss=error.square().sum() / inputs.num_sequences, metrics=metrics)


def _collect_scores(inputs: LossInputs) -> Tensor:
    """Return the score of every sequence, shape [S]."""
    values = inputs.require("values")
    if len(values) != len(inputs.sequence_lengths):
        raise ValueError(
            f"a reward model requires exactly one loss token per sample (the last token), got {len(values)} loss "
            f"tokens in {len(inputs.sequence_lengths)} samples"
        )
    return values
