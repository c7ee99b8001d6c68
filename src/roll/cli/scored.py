"""What came of one answer that `roll reward test` scored."""

from __future__ import annotations

from dataclasses import dataclass

from roll.cli.answer_files import AnswerLine
from roll.types import RewardResult

__all__ = ["Scored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What came of one line."""

    line: AnswerLine
    result: RewardResult | None
    duration_s: float
    problem: str = ""
    """Why there is no result."""

    @property
    def surprising(self) -> bool:
        """Whether the file expects something else."""
        expected, result = self.line.expected, self.result
        if expected is None:
            return False
        if result is None:
            return True
        if isinstance(expected, bool):
            right = result.correct if result.correct is not None else result.value > 0
            return right is not expected
        return abs(result.value - expected) > 1e-6
