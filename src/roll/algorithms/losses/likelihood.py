"""The loss of supervised fine-tuning: the negative log-likelihood of the target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.algorithms.aggregate import compute_aggregation_weights
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["LikelihoodLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelihoodLoss:
    """The weighted negative log-likelihood -sum_t w_t log p_t of all loss tokens of the global batch."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """`token_mean` weights all tokens equally, `sequence_mean` all sequences: see `compute_aggregation_weights`."""
    needs = LossRequirements()
    """Only the policy's log-probs are needed."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: The network does not return log-probs.
        """
        logprobs = inputs.require("logprobs")
        nll = -logprobs.detach().sum() / inputs.num_tokens
        loss = -(compute_aggregation_weights(inputs, self.aggregation) * logprobs).sum()
        return LossOutputs(loss=loss, metrics={"sft/nll": nll})
