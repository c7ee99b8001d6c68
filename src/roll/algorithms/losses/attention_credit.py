"""A loss wrapper that multiplies the advantages by attention credit factors: A'_t = gamma_t A_t (arXiv 2510.13554).

The attention maps come from the forward pass that computes the log-probs, so nothing is computed twice. The factors
depend only on the sample and the model's weights, so advantages can be weighted within the loss instead of before it,
with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from roll.algorithms.credit import CreditPattern, compute_credit_factors
from roll.protocols import LossFn
from roll.types import (
    AttentionRange,
    AttentionStatistics,
    BoolArray,
    FloatArray,
    LossInputs,
    LossOutputs,
    LossRequirements,
)

__all__ = ["AttentionCreditLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCreditLoss:
    """A loss with attention-weighted advantages; `compute_credit_factors` documents the fields after `range`."""

    loss: LossFn
    """The wrapped loss, which receives the weighted advantages."""
    range: AttentionRange
    pattern: CreditPattern = "coupled"
    amplification: float = 1.5
    share: float = 0.4
    introduction_window: int = 3
    introduction_share: float = 0.5
    waad_quantile: float = 0.5
    jump_quantile: float = 0.6

    @property
    def needs(self) -> LossRequirements:
        """The requirements of the wrapped loss, plus attention statistics."""
        return replace(self.loss.needs, attention=self.range)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Expert tokens are not weighted, because the policy did not sample them.

        Raises:
            ValueError: The attention statistics are missing.
        """
        if inputs.attention is None:
            raise ValueError("attention credit requires LossInputs.attention, but the trainer did not compute it")
        factors = torch.from_numpy(np.concatenate([self._compute_factors(*own) for own in inputs.attention]))
        advantages = inputs.require("advantages")
        factors = factors.to(advantages)
        if inputs.expert is not None:
            factors = factors.masked_fill(inputs.expert, 1.0)
        outputs = self.loss(replace(inputs, advantages=advantages * factors))
        mean = factors.sum() / inputs.num_tokens
        return replace(outputs, metrics={**outputs.metrics, "policy/credit_factor": mean})

    def _compute_factors(self, statistics: AttentionStatistics, mask: BoolArray) -> FloatArray:
        """Return the factors on the advantages of a sample's n loss tokens, shape [n]."""
        factors = compute_credit_factors(
            statistics,
            mask,
            pattern=self.pattern,
            amplification=self.amplification,
            share=self.share,
            introduction_window=self.introduction_window,
            introduction_share=self.introduction_share,
            waad_quantile=self.waad_quantile,
            jump_quantile=self.jump_quantile,
        )
        return factors[mask]
