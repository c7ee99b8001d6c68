"""A policy's loss and that of a value head on the same network, in one: L + c L_value (PPO, arXiv 1707.06347 eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.algorithms.losses.value import ValueLoss
from roll.protocols import LossFn
from roll.types import LossInputs, LossOutputs, Needs

__all__ = ["PolicyAndValueLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyAndValueLoss:
    """Both losses divide by counts of the global batch, and so does their sum."""

    policy: LossFn
    value: ValueLoss
    coefficient: float

    @property
    def needs(self) -> Needs:
        """What the policy's loss needs, and values."""
        return replace(self.policy.needs, values=True)

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
