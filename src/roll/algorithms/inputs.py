"""The records of losses, under the name by which users' own losses have imported them; they live in `roll.types`."""

from roll.types import LossInputs, LossOutputs, SequenceAttention

__all__ = ["LossInputs", "LossOutputs", "SequenceAttention"]
