"""A policy's loss and that of a value head on the same network, in one: L + c L_value (PPO, arXiv 1707.06347 eq. 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from roll.algorithms.inputs import LossInputs, LossOutputs
from roll.algorithms.losses.value import ValueLoss
from roll.types import AttentionRange

__all__ = ["SharedLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLoss:
    """Both losses divide by counts of the global batch, and so does their sum."""

    policy: Callable[[LossInputs], LossOutputs]
    value: ValueLoss
    coefficient: float

    @property
    def needs_values(self) -> bool:
        """The trainer must bring values, with gradient, their returns and, to clip, what they were."""
        return True

    @property
    def needs_entropy(self) -> bool:
        """As the policy's loss."""
        return getattr(self.policy, "needs_entropy", False)

    @property
    def needs_full_kl(self) -> bool:
        """As the policy's loss."""
        return getattr(self.policy, "needs_full_kl", False)

    @property
    def needs_attention(self) -> AttentionRange | None:
        """As the policy's loss."""
        return getattr(self.policy, "needs_attention", None)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share.

        Raises:
            ValueError: values or returns did not come.
        """
        policy, value = self.policy(inputs), self.value(inputs)
        return replace(
            policy,
            loss=policy.loss + self.coefficient * value.loss,
            metrics={**policy.metrics, **value.metrics, "value/loss": value.loss.detach()},
        )
