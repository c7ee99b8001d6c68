"""Inputs and outputs of losses, re-exported from `roll.types` under the module name that user losses import."""

from roll.types import LossInputs, LossOutputs, SequenceAttention

__all__ = ["LossInputs", "LossOutputs", "SequenceAttention"]
