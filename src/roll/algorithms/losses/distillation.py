"""Distillation losses: over the whole vocabulary, or over the teacher's top-k tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.aggregate import compute_aggregation_weights
from roll.algorithms.probabilities import log1mexp
from roll.types import Divergence, LossInputs, LossOutputs, LossRequirements

__all__ = ["DistillationLoss", "TopKDistillationLoss"]

_REVERSE_KL = Divergence()


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLoss:
    """The mean exact divergence, over the whole vocabulary, from a teacher that is loaded in the trainer.

    On text that the student sampled, this is on-policy distillation, arXiv 2306.13649 (GKD), without a gradient through
    the sampling; on other text, it is classic distillation, arXiv 1503.02531. With a temperature, the gradient is not
    multiplied by the temperature's square.
    """

    divergence: Divergence = _REVERSE_KL
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """`token_mean` weights all tokens equally, `sequence_mean` all sequences: see `compute_aggregation_weights`."""

    @property
    def needs(self) -> LossRequirements:
        """The loss requires the policy's divergence from the teacher."""
        return LossRequirements(divergence=self.divergence)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: The divergence is missing.
        """
        return _build_outputs(inputs, inputs.require("divergence"), self.aggregation)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKDistillationLoss:
    """The mean of KL(teacher || policy) over the teacher's stored top-k tokens.

    All other tokens are treated as one token: sum_k q log(q / p) + q' log(q' / p') with q' = 1 - sum_k q. This sum
    never exceeds the exact divergence. In float32, a p' or q' below 1.2e-7 is clamped to 1.2e-7 and has no gradient. So
    with k of 1 or 2, a policy whose p' is below this bound gets no gradient towards a less confident teacher.
    """

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """`token_mean` weights all tokens equally, `sequence_mean` all sequences: see `compute_aggregation_weights`."""
    needs = LossRequirements(top_logprobs=True)
    """The loss requires the policy's log-probs of the same tokens."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: The teacher's top-k log-probs are missing.
        """
        policy, teacher = (_append_remainder(inputs.require(name)) for name in ("top_logprobs", "teacher_top_logprobs"))
        # KL(q || p) = sum q (log q - log p), with the remaining tokens as one entry.
        return _build_outputs(inputs, (teacher.exp() * (teacher - policy)).sum(1), self.aggregation)


def _append_remainder(logprobs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens, so that each row is a whole distribution, shape [N, k + 1]."""
    return torch.cat([logprobs, log1mexp(torch.logsumexp(logprobs, dim=1, keepdim=True))], dim=1)


def _build_outputs(
    inputs: LossInputs, divergence: Tensor, aggregation: Literal["token_mean", "sequence_mean"]
) -> LossOutputs:
    sums = {"distill/divergence": divergence.detach().sum(), "distill/nll": -inputs.require("logprobs").detach().sum()}
    return LossOutputs(
        loss=(compute_aggregation_weights(inputs, aggregation) * divergence).sum(),
        metrics={name: value / inputs.num_tokens for name, value in sums.items()},
    )
