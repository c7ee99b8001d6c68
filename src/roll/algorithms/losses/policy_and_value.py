"""The sum of a policy loss and a value head's loss on the same network: L + c L_value (PPO, arXiv 1707.06347 eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.algorithms.losses.value import ValueLoss
from roll.protocols import LossFn
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["PolicyAndValueLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyAndValueLoss:
    """A policy loss plus a weighted value loss; both are normalized by the counts of the global batch."""

    policy: LossFn
    value: ValueLoss
    coefficient: float

    @property
    def needs(self) -> LossRequirements:
        """The requirements of the policy loss, plus values."""
        return replace(self.policy.needs, values=True)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: Values or returns are missing.
        """
        policy, value = self.policy(inputs), self.value(inputs)
        return replace(
            policy,
            loss=policy.loss + self.coefficient * value.loss,
            metrics={**policy.metrics, **value.metrics, "value/loss": value.loss.detach()},
        )
