"""Losses of preferences: of two answers to one prompt, or of answers that are wanted or not."""

from roll.algorithms.losses.preference.pairs import PreferenceLoss
from roll.algorithms.losses.preference.single import KTOLoss, reference_point

__all__ = ["KTOLoss", "PreferenceLoss", "reference_point"]
