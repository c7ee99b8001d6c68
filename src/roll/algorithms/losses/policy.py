"""The clipped policy-gradient loss of PPO and GRPO (arXiv 1707.06347 eq. 7, arXiv 2402.03300 eq. 3).

    loss = sum_t w_t [ -gate(r_t, A_t) + beta * KL_t ],    r_t = pi(t) / pi_old(t)

It is put together from independent parts: the ratio's level (`token_log_ratio`), the gate
(`clipped_objective`), the token weights (`algorithms.aggregate`), and the KL estimator (`algorithms.kl`).
Advantages come with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregate import Aggregation, token_weights
from roll.algorithms.inputs import LossInputs, LossOutputs
from roll.algorithms.kl import LOG_RATIO_LIMIT, KLEstimator, kl_per_token

__all__ = ["PolicyLoss", "clipped_objective", "token_log_ratio"]


def token_log_ratio(inputs: LossInputs) -> Tensor:
    """log pi/pi_old of every token [N], clamped so that `exp` stays finite."""
    return torch.clamp(inputs.logprobs - inputs.old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of every token [N]; to be maximised."""
    return torch.minimum(ratio * advantages, torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Clipped policy gradient with an optional penalty on the distance to a reference model.

    Metrics are means over the loss tokens of the global batch, and maxima where the name begins with `max/`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "sequence_mean"
    kl_coefficient: float = 0.0
    """0 leaves the penalty out; `ref_logprobs` are then not needed."""
    kl_estimator: KLEstimator = "k3"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share of the loss of the global batch.

        Raises:
            ValueError: there is a KL penalty and no `ref_logprobs`.
        """
        log_ratio = token_log_ratio(inputs)
        ratio = log_ratio.exp()
        weights = token_weights(inputs, self.aggregation)
        loss = -(weights * clipped_objective(ratio, inputs.advantages, self.clip_low, self.clip_high)).sum()
        metrics = self._metrics(inputs, log_ratio.detach(), ratio.detach(), weights)
        if self.kl_coefficient > 0:
            if inputs.ref_logprobs is None:
                raise ValueError(f"kl_coefficient is {self.kl_coefficient} but the batch has no ref_logprobs")
            kl = kl_per_token(inputs.logprobs, inputs.ref_logprobs, self.kl_estimator)
            loss = loss + self.kl_coefficient * (weights * kl).sum()
            metrics["policy/kl_reference"] = kl.detach().sum() / inputs.num_tokens
        return LossOutputs(loss=loss, metrics=metrics)

    def _metrics(self, inputs: LossInputs, log_ratio: Tensor, ratio: Tensor, weights: Tensor) -> dict[str, Tensor]:
        advantages = inputs.advantages
        clipped = ((ratio > 1.0 + self.clip_high) & (advantages > 0)) | (
            (ratio < 1.0 - self.clip_low) & (advantages < 0)
        )
        mismatch = (inputs.old_logprobs - inputs.rollout_logprobs).abs()
        sums = {
            "policy/clip_fraction": clipped.to(ratio.dtype).sum(),
            "policy/approximate_kl": (ratio - 1.0 - log_ratio).sum(),
            "policy/entropy_estimate": -inputs.logprobs.detach().sum(),
            "policy/ratio": ratio.sum(),
            "policy/rollout_logprob_difference": mismatch.sum(),
        }
        metrics = {name: value / inputs.num_tokens for name, value in sums.items()}
        metrics["policy/loss_scale"] = (weights * (advantages * ratio).abs()).sum()
        metrics["max/policy/ratio"] = ratio.max() if len(ratio) else ratio.new_zeros(())
        metrics["max/policy/rollout_logprob_difference"] = mismatch.max() if len(mismatch) else ratio.new_zeros(())
        return metrics
