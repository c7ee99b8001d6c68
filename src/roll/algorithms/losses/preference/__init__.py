"""Preference losses: on pairs of answers to one prompt, or on single answers labeled desirable or undesirable."""

from roll.algorithms.losses.preference.pairs import PreferenceLoss
from roll.algorithms.losses.preference.single import KTOLoss, reference_point

__all__ = ["KTOLoss", "PreferenceLoss", "reference_point"]
