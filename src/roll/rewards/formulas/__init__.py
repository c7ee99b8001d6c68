"""Formulas read and compared without a computer-algebra system: fast, and bounded in time and memory."""

from roll.rewards.formulas.compare import same_answer
from roll.rewards.formulas.nodes import NotUnderstoodError, TooLargeError

__all__ = ["NotUnderstoodError", "TooLargeError", "same_answer"]
