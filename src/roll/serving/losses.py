"""The losses of the API. Each is a sum over the tokens of all data, not a mean.

With p the log-prob of a target token, q its log-prob when it was sampled, A its advantage, w its weight and
r = exp(p - q):

    cross_entropy          -w p
    importance_sampling    -r A
    ppo                    -min(r A, clip(r, low, high) A)
    cispo                  -clip(r, low, high) A p,  with a constant clip(r, low, high)
    dro                    -(p A - beta / 2 (p - q)^2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from roll.errors import shorten
from roll.serving.failures import ApiError
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["LOSSES", "TokenSumLoss", "build_loss"]

_NO_LOSS = {
    "stable_reinforce": "it has no published formula; use importance_sampling, ppo or cispo",
    "gspo": "use importance_sampling, ppo or cispo, or a custom loss",
    "custom": "custom losses run in the client, as forward_backward_custom does by default",
}


@dataclass(frozen=True, slots=True)
class TokenSumLoss:
    """A loss that is summed over tokens; see the formulas of the module.

    The column `advantages` of the samples has A or w, and `rollout_logprobs` has q.
    """

    name: str
    columns: tuple[str, ...] = ("logprobs", "advantages")
    """The inputs that every datum needs in addition to `target_tokens`."""
    settings: tuple[str, ...] = ()
    """The keys of `loss_fn_config`."""
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    beta: float = 0.05

    @property
    def needs(self) -> LossRequirements:
        """Nothing in addition to the log-probs."""
        return LossRequirements()

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return a micro-batch's part of the sum."""
        p, a = inputs.require("logprobs"), inputs.require("advantages")
        if self.name == "cross_entropy":
            return LossOutputs(loss=-(p * a).sum())
        difference = p - inputs.require("rollout_logprobs")
        if self.name == "dro":
            return LossOutputs(loss=-(p * a - 0.5 * self.beta * difference.square()).sum())
        ratio = difference.exp()
        if self.name == "importance_sampling":
            return LossOutputs(loss=-(ratio * a).sum())
        clipped = ratio.clamp(self.clip_low_threshold, self.clip_high_threshold)
        if self.name == "ppo":
            return LossOutputs(loss=-torch.minimum(ratio * a, clipped * a).sum())
        return LossOutputs(loss=-(clipped.detach() * p * a).sum())


_CLIPS = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, TokenSumLoss] = {
    loss.name: loss
    for loss in (
        TokenSumLoss("cross_entropy", columns=("weights",)),
        TokenSumLoss("importance_sampling"),
        TokenSumLoss("ppo", settings=_CLIPS),
        TokenSumLoss("cispo", settings=_CLIPS),
        TokenSumLoss("dro", settings=("beta",)),
    )
}
"""The losses, by name, with default settings."""


def build_loss(name: str, config: Mapping[str, float | str]) -> TokenSumLoss:
    """Return a loss with the settings of `loss_fn_config`.

    Raises:
        ApiError: The loss or a setting is not supported, or a value is invalid.
    """
    known = ", ".join(LOSSES)
    if name not in LOSSES:
        reason = f" ({_NO_LOSS[name]})" if name in _NO_LOSS else ""
        raise ApiError(
            400, f"the loss {shorten(name)} is not supported{reason}. Supported losses: {known}.", field="loss_fn"
        )
    loss = LOSSES[name]
    values: dict[str, float] = {}
    for key, value in config.items():
        field = f"loss_fn_config.{key[:64]}"
        if key not in loss.settings:
            allowed = f": {', '.join(loss.settings)}" if loss.settings else ": it has none"
            raise ApiError(400, f"this is not a setting of the loss '{name}'; its settings are{allowed}.", field=field)
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise ApiError(400, f"must be a finite number >= 0, got {shorten(value)}.", field=field)
        values[key] = float(value)
    chosen = replace(loss, **values)  # pyrefly: ignore[bad-argument-type]  # the keys are those of `settings`
    if chosen.clip_low_threshold > chosen.clip_high_threshold:
        raise ApiError(
            400,
            f"must be <= clip_high_threshold ({chosen.clip_high_threshold:g}), got {chosen.clip_low_threshold:g}.",
            field="loss_fn_config.clip_low_threshold",
        )
    return chosen
