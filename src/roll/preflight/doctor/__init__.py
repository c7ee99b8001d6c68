"""What `roll doctor` looks at: whether this machine, its software and its network are fit for a run, and what to do."""

from roll.preflight.doctor.examining import SECTIONS, examine
from roll.preflight.doctor.finding import Finding, Verdict, render, worst

__all__ = ["SECTIONS", "Finding", "Verdict", "examine", "render", "worst"]
