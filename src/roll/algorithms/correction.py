"""Correction for the difference between the engine that sampled and the trainer that learns.

    factor w = old / rollout at some level, a constant;   weight = min(w, upper), or 1;   mask_low <= w <= mask_high

Both multiply a token's policy-gradient objective alone. A masked token stays in the counts that normalise the loss.
Sources: truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl); sequence and geometric
masks (IPA, arXiv 2512.24873 eq. 8; ROLL's `train_infer_correction`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.inputs import LossInputs
from roll.algorithms.ratio import clamped, segment_means, segment_sums, segments

__all__ = ["Correction", "CorrectionLevel", "mismatch"]

CorrectionLevel: TypeAlias = Literal["token", "chunk", "sequence", "geometric"]


def mismatch(inputs: LossInputs) -> Tensor:
    """[N] log of old / rollout, clamped."""
    return clamped(inputs.need("old_logprobs") - inputs.need("rollout_logprobs"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """See `roll.config.algorithm_parts.CorrectionConfig`.

    Log-ratios are clamped to ± `LOG_RATIO_LIMIT`, of tokens and again of what they come to. `chunk` and `geometric` are
    geometric means over a chunk's or sequence's tokens, `sequence` is the product.
    """

    level: CorrectionLevel = "token"
    upper: float | None = 2.0
    mask_low: float | None = None
    mask_high: float | None = None
    veto: float | None = None

    @property
    def pools_sequences(self) -> bool:
        """Whether a token's weight depends on all tokens of its sequence."""
        return self.level in ("sequence", "geometric") or self.veto is not None

    def factor(self, inputs: LossInputs) -> Tensor:
        """w of every token [N], without gradient."""
        difference = mismatch(inputs).detach()
        if self.level == "token":
            return difference.exp()
        ids = segments(inputs, self.level)
        pool = segment_sums if self.level == "sequence" else segment_means
        return clamped(pool(difference, ids))[ids].exp()

    def truncates(self, inputs: LossInputs) -> Tensor:
        """[N] bool: whose factor exceeds `upper`."""
        if self.upper is None:
            return torch.zeros_like(inputs.sequence_ids, dtype=torch.bool)
        return self.factor(inputs) > self.upper

    def weights(self, inputs: LossInputs) -> Tensor:
        """What multiplies every token's objective [N]: 0 where it is left out."""
        factor = self.factor(inputs)
        weight = torch.ones_like(factor) if self.upper is None else factor.clamp(max=self.upper)
        if self.mask_low is not None:
            weight = weight.masked_fill(factor < self.mask_low, 0.0)
        if self.mask_high is not None:
            weight = weight.masked_fill(factor > self.mask_high, 0.0)
        if self.veto is not None:
            own = mismatch(inputs).detach().exp()
            vetoed = segment_sums((own < self.veto).to(own.dtype), inputs.sequence_ids) > 0
            weight = weight.masked_fill(vetoed[inputs.sequence_ids], 0.0)
        return weight
