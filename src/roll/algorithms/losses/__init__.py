"""Losses: `roll.protocols.LossFn`s, from `LossInputs` to `LossOutputs`."""

from roll.algorithms.losses.credited import CreditedLoss
from roll.algorithms.losses.policy import PolicyLoss
from roll.algorithms.losses.policy_and_value import PolicyAndValueLoss
from roll.algorithms.losses.user_function import UserLoss
from roll.algorithms.losses.value import ValueLoss

__all__ = ["CreditedLoss", "PolicyAndValueLoss", "PolicyLoss", "UserLoss", "ValueLoss"]
