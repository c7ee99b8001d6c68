"""Losses that bring the policy near a teacher: over the whole vocabulary, or over the teacher's likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.aggregate import token_weights
from roll.algorithms.probabilities import log_complement
from roll.types import Divergence, LossInputs, LossOutputs, Needs

__all__ = ["DistillationLoss", "TopDistillationLoss"]

_REVERSE = Divergence()


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLoss:
    """The mean divergence from a teacher that the trainer holds, exact over the vocabulary.

    On texts of the student's own it is on-policy distillation, arXiv 2306.13649 (GKD), without a gradient through the
    sampling; on others, the classic one, arXiv 1503.02531. A temperature's gradient is not multiplied by its square.
    """

    divergence: Divergence = _REVERSE
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """See `token_weights`."""

    @property
    def needs(self) -> Needs:
        """The divergence."""
        return Needs(divergence=self.divergence)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share.

        Raises:
            ValueError: the trainer did not bring the divergence.
        """
        return _outputs(inputs, inputs.need("divergence"), self.aggregation)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopDistillationLoss:
    """The mean of KL(teacher || policy) over the k likeliest tokens of a teacher, as they were stored.

    All other tokens count as one: sum_k q log(q / p) + q' log(q' / p') with q' = 1 - sum_k q; it is never above the
    exact divergence. In float32, a p' or q' below 1.2e-7 counts as that, and has no gradient: with one or two tokens, a
    policy that is surer of them than this is no longer drawn back to a less sure teacher.
    """

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """See `token_weights`."""
    needs = Needs(top_logprobs=True)
    """The policy's log-probs of the same tokens."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share.

        Raises:
            ValueError: the teacher's tokens did not come.
        """
        policy, teacher = (_complete(inputs.need(name)) for name in ("top_logprobs", "teacher_top_logprobs"))
        return _outputs(inputs, (teacher.exp() * (teacher - policy)).sum(1), self.aggregation)


def _complete(logprobs: Tensor) -> Tensor:
    """[N, k + 1] log-probs of a whole distribution."""
    return torch.cat([logprobs, log_complement(torch.logsumexp(logprobs, dim=1, keepdim=True))], dim=1)


def _outputs(
    inputs: LossInputs, divergence: Tensor, aggregation: Literal["token_mean", "sequence_mean"]
) -> LossOutputs:
    sums = {"distill/divergence": divergence.detach().sum(), "distill/nll": -inputs.need("logprobs").detach().sum()}
    return LossOutputs(
        loss=(token_weights(inputs, aggregation) * divergence).sum(),
        metrics={name: value / inputs.num_tokens for name, value in sums.items()},
    )
