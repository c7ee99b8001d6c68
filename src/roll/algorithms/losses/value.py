"""The critic's loss: the squared error of PPO, arXiv 1707.06347 eq. 9, with the value clip of OpenAI Baselines.

loss = mean_t 1/2 max( (V - G)^2, (clip(V, V_old - e, V_old + e) - G)^2 )

Without a clip the loss is 1/2 (V - G)^2. The clip is not described in a paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["ValueLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Squared error of values against returns, over all loss tokens of the global batch; expert tokens have error 0.

    Metrics are means over the tokens that the policy sampled.
    """

    clip: float | None = None
    """Clip range e; `None` for no clip."""
    needs = LossRequirements()
    """Only the values of a critic are needed; `PolicyAndValueLoss` requests them if the policy has a value head."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: Values, returns or, with a clip, old values are missing.
        """
        values, returns = inputs.require("values"), inputs.require("returns")
        old = inputs.old_values if self.clip is None else inputs.require("old_values")
        if inputs.expert is not None:  # an expert's return does not estimate the policy's return
            values, returns = (x.masked_fill(inputs.expert, 0.0) for x in (values, returns))
            old = None if old is None else old.masked_fill(inputs.expert, 0.0)
        error = (values - returns).square()
        clipped_share = torch.zeros_like(error)
        if self.clip is not None and old is not None:
            # PPO's value clip, the larger of both errors: a value that already moved by `clip` towards its return gets
            # no further gradient, and one that moved away is still pulled back.
            near = torch.clamp(values, old - self.clip, old + self.clip)
            clipped_error = (near - returns).square()
            clipped_share = (clipped_error > error).to(error.dtype)
            error = torch.maximum(error, clipped_error)
        plain = values.detach()
        sums = {
            "value/mean": plain,
            "value/error": (plain - returns).square(),
            "value/clip_fraction": clipped_share.detach(),
            "value/return": returns,
            "value/return_squared": returns.square(),
        }
        num = inputs.num_own_tokens
        metrics = {name: value.sum() / num for name, value in sums.items()} if num else {}
        return LossOutputs(loss=0.5 * error.sum() / inputs.num_tokens, metrics=metrics)
