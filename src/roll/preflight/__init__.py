"""Checks before a run starts: the report, and the checks that pipelines share."""

from roll.preflight.report import Report, RewardTrial

__all__ = ["Report", "RewardTrial"]
