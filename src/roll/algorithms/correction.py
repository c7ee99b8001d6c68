"""Importance sampling corrections for stale tokens and for the numerical mismatch of engine and trainer.

Three policies assign a log-prob to a sampled token:

    rollout    the engine's, under the policy version that sampled the token
    behavior   the trainer's, under the same version: the "old logits" that are missing according to arXiv 2605.12070
    old        the trainer's, under the policy before this update

    log(old / rollout)  =  log(behavior / rollout)  +  log(old / behavior)
         both           =        mismatch           +       staleness

Mismatch is the difference between engine and trainer under the same weights: kernels, dtypes, 8-bit weights, top_p, and
KV cache entries that an engine kept from older weights. Staleness is the change of the policy since the token was
sampled. A rollout that was interrupted by weight syncs has tokens of several policy versions.

    w = exp(log-ratio) at some level, without gradient; weight = min(w, upper), or 1; mask_low <= w <= mask_high

`corrects` names the log-ratio. `both` needs no further log-probs, and mixes mismatch and staleness for stale tokens.
The other two need `behavior_logprobs`, which the trainer computes from snapshots of its weights; for a token that is
not stale, behavior equals old.

Weights and masks multiply only a token's policy-gradient objective. A masked token is still included in the counts that
normalize the loss. Sources: truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl);
sequence and geometric masks (IPA, arXiv 2512.24873 eq. 8; ROLL's `train_infer_correction`); the decomposition (arXiv
2605.12070).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.ratio import clamp_log_ratio, compute_segment_means, compute_segment_sums, get_segment_ids
from roll.types import LossInputs

__all__ = ["CorrectedRatio", "Correction", "CorrectionLevel", "compute_correction_log_ratio"]

CorrectionLevel: TypeAlias = Literal["token", "chunk", "sequence", "geometric"]
CorrectedRatio: TypeAlias = Literal["both", "mismatch", "staleness"]

_RATIOS: dict[CorrectedRatio, tuple[str, str]] = {
    "both": ("old", "rollout"),
    "mismatch": ("behavior", "rollout"),
    "staleness": ("old", "behavior"),
}


def compute_correction_log_ratio(inputs: LossInputs, corrected_ratio: CorrectedRatio = "both") -> Tensor:
    """Compute the clamped log-ratio of a correction for every token, shape [N].

    Args:
        inputs: The loss inputs.
        corrected_ratio: The ratio: `both` is old / rollout, `mismatch` behavior / rollout, `staleness` old / behavior.

    Raises:
        ValueError: The batch lacks log-probs that the ratio requires.
    """
    above, below = _RATIOS[corrected_ratio]
    return clamp_log_ratio(inputs.require(f"{above}_logprobs") - inputs.require(f"{below}_logprobs"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """An importance correction; see `roll.config.correction.CorrectionConfig`.

    Levels, masks and the veto all use the log-ratio that `corrects` names: by default mismatch and staleness together.
    Log-ratios are clamped to ± `LOG_RATIO_LIMIT`, per token and again after pooling. `chunk` is the geometric mean over
    the tokens of a chunk, `geometric` the geometric mean over a sequence, and `sequence` the product over a sequence.
    """

    corrects: CorrectedRatio = "both"
    level: CorrectionLevel = "token"
    upper: float | None = 2.0
    mask_low: float | None = None
    mask_high: float | None = None
    veto: float | None = None

    @property
    def is_sequence_level(self) -> bool:
        """True if a token's weight depends on all tokens of its sequence."""
        return self.level in ("sequence", "geometric") or self.veto is not None

    def compute_factor(self, inputs: LossInputs) -> Tensor:
        """Return the importance factor w of every token, shape [N], without gradient."""
        # The correction is a constant weight of the objective: its gradient would fit the policy to the engine.
        difference = compute_correction_log_ratio(inputs, self.corrects).detach()
        if self.level == "token":
            return difference.exp()
        ids = get_segment_ids(inputs, self.level)
        pool = compute_segment_sums if self.level == "sequence" else compute_segment_means
        return clamp_log_ratio(pool(difference, ids))[ids].exp()

    def mask_truncated(self, inputs: LossInputs) -> Tensor:
        """Return a mask [N] of the tokens whose importance factor is truncated; all false if `upper` is `None`."""
        if self.upper is None:
            return torch.zeros_like(inputs.sequence_ids, dtype=torch.bool)
        return self.compute_factor(inputs) > self.upper

    def compute_weights(self, inputs: LossInputs) -> Tensor:
        """Compute the weight of every token's objective, shape [N]; 0 for masked tokens."""
        factor = self.compute_factor(inputs)
        # Truncated importance sampling: min(w, upper). The masks compare the factor before the truncation.
        weight = torch.ones_like(factor) if self.upper is None else factor.clamp(max=self.upper)
        if self.mask_low is not None:
            weight = weight.masked_fill(factor < self.mask_low, 0.0)
        if self.mask_high is not None:
            weight = weight.masked_fill(factor > self.mask_high, 0.0)
        if self.veto is not None:
            # The veto looks at single tokens, whatever the level: one nearly impossible token makes the whole
            # sequence off-policy.
            own = compute_correction_log_ratio(inputs, self.corrects).detach().exp()
            vetoed = compute_segment_sums((own < self.veto).to(own.dtype), inputs.sequence_ids) > 0
            weight = weight.masked_fill(vetoed[inputs.sequence_ids], 0.0)
        return weight
