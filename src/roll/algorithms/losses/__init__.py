"""Losses: `roll.protocols.LossFn`s, from `LossInputs` to `LossOutputs`."""

from roll.algorithms.losses.credited import CreditedLoss
from roll.algorithms.losses.distillation import DistillationLoss, TopDistillationLoss
from roll.algorithms.losses.likelihood import LikelihoodLoss
from roll.algorithms.losses.own import OwnLoss
from roll.algorithms.losses.policy import PolicyLoss
from roll.algorithms.losses.preference import KTOLoss, PreferenceLoss
from roll.algorithms.losses.reward import BradleyTerryLoss, RegressionLoss
from roll.algorithms.losses.shared import SharedLoss
from roll.algorithms.losses.summed import SummedLoss
from roll.algorithms.losses.value import ValueLoss

__all__ = [
    "BradleyTerryLoss",
    "CreditedLoss",
    "DistillationLoss",
    "KTOLoss",
    "LikelihoodLoss",
    "OwnLoss",
    "PolicyLoss",
    "PreferenceLoss",
    "RegressionLoss",
    "SharedLoss",
    "SummedLoss",
    "TopDistillationLoss",
    "ValueLoss",
]
