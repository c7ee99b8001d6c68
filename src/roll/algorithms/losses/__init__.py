"""Losses: implementations of `roll.protocols.LossFn`, callables that map `LossInputs` to `LossOutputs`."""

from roll.algorithms.losses.attention_credit import AttentionCreditLoss
from roll.algorithms.losses.distillation import DistillationLoss, TopKDistillationLoss
from roll.algorithms.losses.likelihood import LikelihoodLoss
from roll.algorithms.losses.policy import PolicyLoss
from roll.algorithms.losses.policy_and_value import PolicyAndValueLoss
from roll.algorithms.losses.preference import KTOLoss, PreferenceLoss
from roll.algorithms.losses.reward import BradleyTerryLoss, RegressionLoss
from roll.algorithms.losses.summed import SummedLoss
from roll.algorithms.losses.user_function import UserLoss
from roll.algorithms.losses.value import ValueLoss

__all__ = [
    "AttentionCreditLoss",
    "BradleyTerryLoss",
    "DistillationLoss",
    "KTOLoss",
    "LikelihoodLoss",
    "PolicyAndValueLoss",
    "PolicyLoss",
    "PreferenceLoss",
    "RegressionLoss",
    "SummedLoss",
    "TopKDistillationLoss",
    "UserLoss",
    "ValueLoss",
]
