"""The state that a run keeps between steps, besides weights: the controller's part of a checkpoint.

`RunState` is what every run has. A pipeline that remembers more adds fields in a class of its own; in the file they lie
side by side.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from roll.errors import CheckpointVersionError
from roll.version import DISTRIBUTION, __version__

__all__ = ["RunState"]

FORMAT = 5
"""Of `state.json`. What a version with a higher number cannot read, docs/operations/upgrading.md says."""
OLDEST = 4
"""The oldest format that is read."""


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
    unchanging: dict[str, str] = field(default_factory=dict)
    """Digests of held-out rows and of the user's code (`roll.pipelines.unchanging`)."""

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
        """Return the state as plain data, with the format's number and the version of ROLL."""
        return {"format": FORMAT, "roll": __version__, **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read what `to_json` wrote, also of a class with more fields.

        Raises:
            CheckpointVersionError: another version wrote it, and this one cannot read it.
        """
        found, by = value.get("format"), value.get("roll", "")
        writer = f"ROLL {by}" if by else "another version of ROLL"
        if not isinstance(found, int) or not OLDEST <= found <= FORMAT:
            raise CheckpointVersionError(
                f"it has format {found!r} ({writer} wrote it), and ROLL {__version__} reads formats {OLDEST} to "
                f"{FORMAT}. {_way_out(found, by)}"
            )
        if found == 4 and "accuracies" in value:
            value = {**value, "scores": value["accuracies"]}
        value = {"unchanging": {}, **value}  # files of older versions have none
        lacks = [each.name for each in fields(cls) if each.name not in value]
        if lacks:
            raise CheckpointVersionError(
                f"its state.json lacks {', '.join(map(repr, lacks))}, which ROLL {__version__} needs ({writer} wrote "
                f"it). {_way_out(None, by)}"
            )
        return cls(**{each.name: value[each.name] for each in fields(cls)})


def _way_out(found: Any, by: str) -> str:
    if isinstance(found, int) and found > FORMAT:
        return f"Upgrade: pip install '{DISTRIBUTION}{f'>={by}' if by else ''}' --upgrade."
    install = f"pip install '{DISTRIBUTION}=={by}'" if by else "install the version that wrote it"
    return f"Resume it with that version ({install}), or train a new run from its model: model=CHECKPOINT/model."
