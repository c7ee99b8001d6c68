"""The preference loss on pairs of answers, composed of independent parts.

    loss = 1 / pairs sum_pairs [ l(s_w, s_l) + alpha NLL_w ]

    s     score of an answer: sum or mean over its tokens of log pi_t - log ref_t, or only of log pi_t
    l     pairwise loss of the two scores: see `pairwise`
    NLL   negative log-likelihood of the chosen answer, which prevents its probability from decreasing

Named methods differ only in these parts: the defaults are DPO; SimPO uses means without a reference, and a margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from roll.algorithms.losses.preference.pairwise import OddsRatioLoss, PairwiseLoss, SigmoidLoss
from roll.algorithms.pairs import Pairs, compute_comparison_accuracy, find_pairs, get_pair_margins
from roll.algorithms.ratio import compute_segment_sums
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["PreferenceLoss", "compute_sequence_scores"]

_DEFAULT_PAIRWISE_LOSS = SigmoidLoss()


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceLoss:
    """A preference loss: a mean over the pairs of the global batch. The defaults are DPO's.

    Metrics are means over the pairs; a reward is beta times a score. In the accuracy, a pair with equal rewards counts
    as one half.
    """

    pairwise_loss: PairwiseLoss = _DEFAULT_PAIRWISE_LOSS
    beta: float = 0.1
    """Factor from scores to rewards; IPO's tau, ORPO's lambda."""
    scores: Literal["sum", "mean"] = "sum"
    """The score of an answer is the `sum` or the `mean` over its tokens."""
    against_reference: bool = True
    """If True, scores are log-ratios to the reference; otherwise, scores are log-probs."""
    margin: float = 0.0
    """Required difference of the chosen and the rejected reward (SimPO's gamma); a pair's `target` is added."""
    likelihood: float = 0.0
    """Coefficient alpha of the NLL."""
    likelihood_mean: Literal["tokens", "answers"] = "tokens"
    """Mean over all tokens of the chosen answers, or over each answer's tokens and then answers (arXiv 2404.19733)."""
    needs = LossRequirements(whole_units=True)
    """The loss requires the log-probs of both answers of a pair in one micro-batch."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta must be > 0, got {self.beta}")
        if self.margin and not self.pairwise_loss.supports_margin:
            raise ValueError(
                f"{type(self.pairwise_loss).__name__} does not support margins, so margin must be 0, got {self.margin}"
            )
        if isinstance(self.pairwise_loss, OddsRatioLoss) and (self.scores != "mean" or self.against_reference):
            raise ValueError(
                "the odds ratio requires mean log-probs: set scores to 'mean' and against_reference to False"
            )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: A loss unit does not have one preferred and one other sequence, a column is missing, or pairs
                have margins that the pairwise loss does not support.
        """
        pairs = find_pairs(inputs)
        scores = compute_sequence_scores(inputs, mean=self.scores == "mean", against_reference=self.against_reference)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        margins = get_pair_margins(inputs, pairs, self.margin)
        if margins is not None and not self.pairwise_loss.supports_margin:
            raise ValueError(
                f"{type(self.pairwise_loss).__name__} does not support margins, so pairs must not have margins"
            )
        shifted = rejected if margins is None else rejected + margins / self.beta
        loss = self.pairwise_loss(chosen, shifted, self.beta).sum() / inputs.num_units
        metrics = self._compute_metrics(inputs, pairs, chosen.detach(), rejected.detach())
        if self.likelihood:
            nll = self._compute_nll(inputs, pairs)
            loss = loss + self.likelihood * nll
            metrics["preference/nll"] = nll.detach()
        return LossOutputs(loss=loss, metrics=metrics)

    def _compute_nll(self, inputs: LossInputs, pairs: Pairs) -> Tensor:
        """Return the micro-batch's contribution to the mean negative log-likelihood of the chosen answers."""
        sums = compute_segment_sums(inputs.require("logprobs"), inputs.sequence_ids)[pairs.chosen]
        if self.likelihood_mean == "tokens":
            return -sums.sum() / inputs.num_preferred_tokens
        return -(sums / inputs.sequence_lengths[pairs.chosen]).sum() / inputs.num_units

    def _compute_metrics(self, inputs: LossInputs, pairs: Pairs, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        logprobs = compute_segment_sums(inputs.require("logprobs").detach(), inputs.sequence_ids)
        sums = {
            "preference/reward_chosen": self.beta * chosen.sum(),
            "preference/reward_rejected": self.beta * rejected.sum(),
            "preference/margin": self.beta * (chosen - rejected).sum(),
            "preference/accuracy": compute_comparison_accuracy(chosen - rejected).sum(),
            "preference/logprob_chosen": logprobs[pairs.chosen].sum(),
            "preference/logprob_rejected": logprobs[pairs.rejected].sum(),
        }
        return {name: value / inputs.num_units for name, value in sums.items()}


def compute_sequence_scores(inputs: LossInputs, *, mean: bool, against_reference: bool) -> Tensor:
    """Return the sum or mean of every sequence's log-ratios to the reference, or of its log-probs, shape [S]."""
    per_token = inputs.require("logprobs")
    if against_reference:
        per_token = per_token - inputs.require("ref_logprobs")
    sums = compute_segment_sums(per_token, inputs.sequence_ids)
    return sums / inputs.sequence_lengths if mean else sums
