"""What a run must remember between steps, besides weights: the controller's part of a checkpoint.

`RunState` is what every run has. A pipeline that remembers more adds fields in a class of its own; in the file they lie
side by side.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from roll.errors import CheckpointError

__all__ = ["RunState"]

FORMAT = 5
_READABLE = {4, FORMAT}


@dataclass(kw_only=True, slots=True)
class RunState:
    """Where the run stands at a step's boundary. Everything here is plain data."""

    step: int = 0
    """Steps completed."""
    policy_version: int = 0
    """Updates that moved the policy's weights, which engines got, where there are any; a step without gradient leaves
    it."""
    data: dict[str, Any] = field(default_factory=dict)
    """Cursor of the prompt stream (`PromptStream.state()`)."""
    num_draws: int = 0
    """Draws up to the boundary; the ledger's later ones are forgotten when the run resumes."""
    evaluated_at: int = -1
    """Step after which the policy was last evaluated; -1 for never."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of the evaluations that had answers, `eval/score` by step."""
    best_step: int | None = None
    """Step, after the first update, with the best evaluation score (the earliest of equals)."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Steps in a row for each alarm."""

    def note_score(self, step: int, score: float) -> None:
        """Remember an evaluation's score, of which more is better. The model before training is no candidate for the
        best: where it is as good as any, the best that training made is kept. What is no number is none either, and
        no file could hold it.
        """
        if not math.isfinite(score):
            return
        best = max((found for at, found in self.scores.items() if at != "0"), default=float("-inf"))
        self.scores[str(step)] = score
        if step > 0 and score > best:
            self.best_step = step

    def to_json(self) -> dict[str, Any]:
        """Plain data with a format number."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read what `to_json` wrote, also of a class with more fields.

        Raises:
            CheckpointError: it was written by an incompatible version.
        """
        found = value.get("format")
        if found not in _READABLE:
            raise CheckpointError(f"state.json has format {found!r}, this version of ROLL reads {FORMAT}")
        if found == 4:
            value = {**value, "scores": value["accuracies"]}
        try:
            return cls(**{each.name: value[each.name] for each in fields(cls)})
        except KeyError as error:
            raise CheckpointError(f"state.json has no field {error}") from None
