"""Preference losses: on pairs of answers to one prompt, or on single answers labeled desirable or undesirable."""

from roll.algorithms.losses.preference.kto import KTOLoss, compute_reference_point
from roll.algorithms.losses.preference.pairs import PreferenceLoss

__all__ = ["KTOLoss", "PreferenceLoss", "compute_reference_point"]
