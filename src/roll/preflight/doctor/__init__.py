"""`roll doctor`: checks whether this machine, its software and its network are ready for a run."""

from roll.preflight.doctor.checks import SECTIONS, examine
from roll.preflight.doctor.finding import Finding, Verdict, find_worst_verdict, render

__all__ = ["SECTIONS", "Finding", "Verdict", "examine", "find_worst_verdict", "render"]
