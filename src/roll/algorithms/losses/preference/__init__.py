"""Preference losses: on pairs of answers to one prompt, or on single answers labeled desirable or undesirable."""

from roll.algorithms.losses.preference.pairs import PreferenceLoss
from roll.algorithms.losses.preference.single import KTOLoss, compute_reference_point

__all__ = ["KTOLoss", "PreferenceLoss", "compute_reference_point"]
