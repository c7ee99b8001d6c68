"""The policy-gradient loss, composed of independent parts.

    loss = sum_t w_t [ -c_t gate(r_t, A_t) + beta KL_t - eta m_t H_t ]

    r_t  ratio of new to old probability           `algorithms.ratio`
    gate objective of ratio and advantage          `algorithms.gates`
    c_t  engine and staleness correction           `algorithms.correction`
    w_t  token weights of the aggregation          `algorithms.aggregate`
    KL_t divergence from the reference model       `algorithms.kl`
    H_t  entropy, for tokens with m_t = 1

Advantages are a field of the inputs. Expert tokens have the objective A log pi, without a ratio, a correction, or a
divergence estimated from samples, because the policy did not sample them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregate import Aggregation, compute_aggregation_weights
from roll.algorithms.correction import Correction, compute_correction_log_ratio
from roll.algorithms.gates import Gate, MinClip
from roll.algorithms.kl import KLEstimator, estimate_kl
from roll.algorithms.ratio import (
    RatioAgainst,
    RatioLevel,
    Reduction,
    build_token_limit_mask,
    clamp_log_ratio,
    compute_log_ratio,
)
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["PolicyLoss"]

_DEFAULT_GATE = MinClip()
_DEFAULT_CORRECTION = Correction()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy-gradient loss of configurable ratio, gate, correction and aggregation; by default GRPO's clipped loss.

    Metrics are means over the loss tokens of the global batch that the policy sampled. Expert tokens have neither a
    ratio nor an engine log-prob, so these metrics are absent if a batch has only demonstrations.
    """

    ratio_level: RatioLevel = "token"
    ratio_reduce: Reduction = "geometric"
    ratio_against: RatioAgainst = "old"
    ratio_token_limit: float | None = None
    gate: Gate = _DEFAULT_GATE
    aggregation: Aggregation = "sequence_mean"
    correction: Correction = _DEFAULT_CORRECTION
    kl_coefficient: float = 0.0
    """0 disables the penalty; `ref_logprobs` are then not needed."""
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0

    @property
    def needs(self) -> LossRequirements:
        """The requirements of the KL penalty, the entropy bonus, and sequence-level ratios or corrections."""
        return LossRequirements(
            entropy=self.entropy_coefficient > 0,
            full_kl=self.kl_coefficient > 0 and self.kl_estimator == "full",
            whole_sequences=self.ratio_level in ("sequence", "sequence_token") or self.correction.is_sequence_level,
        )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss of the global batch.

        Raises:
            ValueError: A required column is missing.
        """
        ratio = compute_log_ratio(
            inputs,
            level=self.ratio_level,
            reduce=self.ratio_reduce,
            against=self.ratio_against,
            max_token_log_ratio=self.ratio_token_limit,
            clamp=self.gate.uses_ratio,
        )
        logprobs, advantages = inputs.require("logprobs"), inputs.require("advantages")
        weights = compute_aggregation_weights(inputs, self.aggregation)
        corrections = self.correction.compute_weights(inputs)
        # The correction multiplies the gated objective: the gate bounds the policy's change,
        # the correction removes the sampling error.
        objective = corrections * self.gate(ratio, logprobs, advantages)
        if inputs.expert is not None:
            # Demonstrations were not sampled by any policy, so they have no ratio and no correction: plain A log pi.
            objective = torch.where(inputs.expert, advantages * logprobs, objective)
        loss = -(weights * objective).sum()
        metrics, maxima = self._compute_metrics(inputs, ratio.detach(), weights, corrections)
        if self.kl_coefficient > 0:
            kl = self._compute_kl(inputs)
            loss = loss + self.kl_coefficient * (weights * kl).sum()
            own = kl.detach() if inputs.expert is None else kl.detach().masked_fill(inputs.expert, 0.0)
            if inputs.num_own_tokens:
                metrics["policy/kl_reference"] = own.sum() / inputs.num_own_tokens
        if self.entropy_coefficient > 0:
            entropy = inputs.require("entropy")
            bonus = entropy if inputs.entropy_mask is None else entropy.masked_fill(~inputs.entropy_mask, 0.0)
            loss = loss - self.entropy_coefficient * (weights * bonus).sum()
            metrics["policy/entropy"] = entropy.detach().sum() / inputs.num_tokens
        return LossOutputs(loss=loss, metrics=metrics, maxima=maxima)

    def _compute_kl(self, inputs: LossInputs) -> Tensor:
        if self.kl_estimator == "full":
            return inputs.require("full_kl")
        kl = estimate_kl(inputs.require("logprobs"), inputs.require("ref_logprobs"), self.kl_estimator)
        return kl if inputs.expert is None else kl.masked_fill(inputs.expert, 0.0)

    def _compute_metrics(
        self, inputs: LossInputs, ratio_log: Tensor, weights: Tensor, corrections: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the micro-batch's contribution to the metrics that are means over the global batch, and its maxima."""
        advantages, ratio = inputs.require("advantages"), clamp_log_ratio(ratio_log).exp()
        logprobs = inputs.require("logprobs").detach()
        # approximate_kl is per token at every ratio level, so that runs with different losses can be compared.
        token_log_ratio = clamp_log_ratio(logprobs - inputs.require("old_logprobs"))
        difference = compute_correction_log_ratio(inputs)
        clipped = self.gate.compute_clip_mask(ratio, advantages)
        if self.ratio_token_limit is not None and self.ratio_level != "token":
            clipped |= build_token_limit_mask(
                inputs, against=self.ratio_against, max_token_log_ratio=self.ratio_token_limit
            )
        truncated = (corrections > 0) & self.correction.mask_truncated(inputs)
        if inputs.expert is not None:  # no engine sampled expert tokens, and no gate applies
            difference, ratio = difference.masked_fill(inputs.expert, 0.0), ratio.masked_fill(inputs.expert, 1.0)
        factor = difference.exp()
        by_token = {
            "policy/clip_fraction": clipped.to(ratio.dtype),
            "policy/approximate_kl": torch.expm1(token_log_ratio) - token_log_ratio,
            "policy/entropy_estimate": -logprobs,
            "policy/ratio": ratio,
            "mismatch/kl": torch.expm1(difference) - difference,
            "mismatch/factor": factor,
            "mismatch/factor_squared": factor.square(),
            "mismatch/truncated": truncated.to(ratio.dtype),
            "mismatch/masked": (corrections == 0).to(ratio.dtype),
        }
        own = torch.ones_like(ratio) if inputs.expert is None else (~inputs.expert).to(ratio.dtype)
        metrics = {}
        if inputs.num_own_tokens:
            metrics = {name: (own * value).sum() / inputs.num_own_tokens for name, value in by_token.items()}
        metrics["policy/loss_scale"] = (weights * (advantages * ratio).abs()).sum()
        found = {"policy/ratio": ratio, "mismatch/factor": factor}
        return metrics, {name: x.max() if len(x) else x.new_zeros(()) for name, x in found.items()}
