"""The policy loss, put together from independent parts.

    loss = sum_t w_t [ -c_t gate(r_t, A_t) + beta KL_t - eta m_t H_t ]

    r_t  ratio of new to old probability           `algorithms.ratio`
    gate how ratio and advantage become one        `algorithms.gates`
    c_t  engine's against the trainer's policy     `algorithms.correction`
    w_t  from tokens to one number                 `algorithms.aggregate`
    KL_t distance to the reference model           `algorithms.kl`
    H_t  entropy, where m_t asks for a bonus

Advantages come with the tokens. An expert's tokens have objective A log pi: no ratio, no correction, and none of the
divergences that are estimated from samples, since the policy did not sample them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregate import Aggregation, token_weights
from roll.algorithms.correction import Correction, off_policy
from roll.algorithms.gates import Gate, MinClip
from roll.algorithms.kl import KLEstimator, kl_per_token
from roll.algorithms.ratio import RatioAgainst, RatioLevel, Reduction, clamped, log_ratio, over_limit
from roll.types import LossInputs, LossOutputs, Needs

__all__ = ["PolicyLoss"]

_CLIP = MinClip()
_CORRECTION = Correction()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Every policy-gradient method, by its parts; the defaults are PPO's clip as GRPO uses it.

    Metrics are means over the loss tokens of the global batch that the policy sampled. An expert's tokens have no ratio
    and no engine's log-prob, so those metrics are absent where a batch has demonstrations alone.
    """

    ratio_level: RatioLevel = "token"
    ratio_reduce: Reduction = "geometric"
    ratio_against: RatioAgainst = "old"
    ratio_token_limit: float | None = None
    gate: Gate = _CLIP
    aggregation: Aggregation = "sequence_mean"
    correction: Correction = _CORRECTION
    kl_coefficient: float = 0.0
    """0 leaves the penalty out; `ref_logprobs` are then not needed."""
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0

    @property
    def needs(self) -> Needs:
        """What its penalty and its bonus are computed from."""
        return Needs(
            entropy=self.entropy_coefficient > 0,
            full_kl=self.kl_coefficient > 0 and self.kl_estimator == "full",
            whole_sequences=self.ratio_level in ("sequence", "sequence_token") or self.correction.pools_sequences,
        )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share of the loss of the global batch.

        Raises:
            ValueError: something that the loss is computed from did not come.
        """
        ratio = log_ratio(
            inputs,
            level=self.ratio_level,
            reduce=self.ratio_reduce,
            against=self.ratio_against,
            token_limit=self.ratio_token_limit,
            bounded=self.gate.exponentiates,
        )
        logprobs, advantages = inputs.need("logprobs"), inputs.need("advantages")
        weights = token_weights(inputs, self.aggregation)
        corrections = self.correction.weights(inputs)
        objective = corrections * self.gate(ratio, logprobs, advantages)
        if inputs.expert is not None:
            objective = torch.where(inputs.expert, advantages * logprobs, objective)
        loss = -(weights * objective).sum()
        metrics, maxima = self._metrics(inputs, ratio.detach(), weights, corrections)
        if self.kl_coefficient > 0:
            kl = self._kl(inputs)
            loss = loss + self.kl_coefficient * (weights * kl).sum()
            own = kl.detach() if inputs.expert is None else kl.detach().masked_fill(inputs.expert, 0.0)
            if inputs.num_own_tokens:
                metrics["policy/kl_reference"] = own.sum() / inputs.num_own_tokens
        if self.entropy_coefficient > 0:
            entropy = inputs.need("entropy")
            bonus = entropy if inputs.entropy_mask is None else entropy.masked_fill(~inputs.entropy_mask, 0.0)
            loss = loss - self.entropy_coefficient * (weights * bonus).sum()
            metrics["policy/entropy"] = entropy.detach().sum() / inputs.num_tokens
        return LossOutputs(loss=loss, metrics=metrics, maxima=maxima)

    def _kl(self, inputs: LossInputs) -> Tensor:
        if self.kl_estimator == "full":
            return inputs.need("full_kl")
        kl = kl_per_token(inputs.need("logprobs"), inputs.need("ref_logprobs"), self.kl_estimator)
        return kl if inputs.expert is None else kl.masked_fill(inputs.expert, 0.0)

    def _metrics(
        self, inputs: LossInputs, ratio_log: Tensor, weights: Tensor, corrections: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums and maxima."""
        advantages, ratio = inputs.need("advantages"), clamped(ratio_log).exp()
        logprobs = inputs.need("logprobs").detach()
        token_log_ratio = clamped(logprobs - inputs.need("old_logprobs"))
        difference = off_policy(inputs)
        clipped = self.gate.clipped(ratio, advantages)
        if self.ratio_token_limit is not None and self.ratio_level != "token":
            clipped |= over_limit(inputs, against=self.ratio_against, token_limit=self.ratio_token_limit)
        truncated = (corrections > 0) & self.correction.truncates(inputs)
        if inputs.expert is not None:  # no engine sampled these tokens, and no gate sees them
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
            "mismatch/left_out": (corrections == 0).to(ratio.dtype),
        }
        own = torch.ones_like(ratio) if inputs.expert is None else (~inputs.expert).to(ratio.dtype)
        metrics = {}
        if inputs.num_own_tokens:
            metrics = {name: (own * value).sum() / inputs.num_own_tokens for name, value in by_token.items()}
        metrics["policy/loss_scale"] = (weights * (advantages * ratio).abs()).sum()
        found = {"policy/ratio": ratio, "mismatch/factor": factor}
        return metrics, {name: x.max() if len(x) else x.new_zeros(()) for name, x in found.items()}
