"""Inputs and outputs of losses, re-exported from `roll.types` because user-defined losses import them from here."""

from roll.types import LossInputs, LossOutputs, SequenceAttention

__all__ = ["LossInputs", "LossOutputs", "SequenceAttention"]
