"""`roll doctor`: checks whether this machine, its software and its network are fit for a run, and gives advice."""

from roll.preflight.doctor.examining import SECTIONS, examine
from roll.preflight.doctor.finding import Finding, Verdict, render, worst

__all__ = ["SECTIONS", "Finding", "Verdict", "examine", "render", "worst"]
