"""Everything that can be known of a run before it starts: what `roll check` prints, and `roll.check` returns."""

from roll.preflight.inspection import inspect
from roll.preflight.report import Report, RewardTrial

__all__ = ["Report", "RewardTrial", "inspect"]
