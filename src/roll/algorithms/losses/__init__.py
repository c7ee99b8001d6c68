"""Losses: picklable callables from `LossInputs` to `LossOutputs`."""

from roll.algorithms.losses.policy import PolicyLoss

__all__ = ["PolicyLoss"]
