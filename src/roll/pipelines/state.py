"""State of a run between steps, apart from weights: the controller's part of a checkpoint.

`RunState` is common to all runs. A pipeline with more state adds fields in a subclass; the file has all fields at the
same level.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from roll.config.former_names import rename_alarms
from roll.errors import CheckpointVersionError
from roll.version import DISTRIBUTION, __version__

__all__ = ["RunState"]

FORMAT = 5
"""Format version of `state.json`; docs/operations/upgrading.md lists incompatible changes."""
OLDEST_FORMAT = 4
"""The oldest format that can be read."""


@dataclass(kw_only=True, slots=True)
class RunState:
    """State of a run at a step's boundary. All fields are JSON-serializable."""

    step: int = 0
    """Number of completed steps."""
    policy_version: int = 0
    """Number of updates that changed the policy's weights and were synced to the engines, if the run has engines."""
    data: dict[str, Any] = field(default_factory=dict)
    """Cursor of the prompt stream (`PromptStream.state()`)."""
    num_draws: int = 0
    """Number of draws up to the boundary; later draws in the ledger are discarded when the run resumes."""
    evaluated_at: int = -1
    """Step after which the policy was last evaluated; -1 for never."""
    scores: dict[str, float] = field(default_factory=dict)
    """`eval/score` of evaluations with answers, by step."""
    best_step: int | None = None
    """Step with the best evaluation score, except step 0; ties go to the earliest step."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Number of consecutive steps of each alarm."""
    unchanging: dict[str, str] = field(default_factory=dict)
    """Digests of held-out rows and of the user's code (`roll.pipelines.fingerprints`)."""

    def record_score(self, step: int, score: float) -> None:
        """Store an evaluation's score; higher is better.

        Step 0 is not a candidate for the best step, so that the best trained model is kept even if the initial model is
        better. A score that is not finite is ignored, since JSON cannot store it.
        """
        if not math.isfinite(score):
            return
        best = max((found for at, found in self.scores.items() if at != "0"), default=float("-inf"))
        self.scores[str(step)] = score
        if step > 0 and score > best:
            self.best_step = step

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON-serializable data, with the format version and ROLL's version."""
        return {"format": FORMAT, "roll": __version__, **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build the state from the data that `to_json` of this class or of a subclass returned.

        Raises:
            CheckpointVersionError: Another version of ROLL wrote the data, and this version cannot read it.
        """
        found, by = value.get("format"), value.get("roll", "")
        writer = f"ROLL {by}" if by else "another version of ROLL"
        if not isinstance(found, int) or not OLDEST_FORMAT <= found <= FORMAT:
            raise CheckpointVersionError(
                f"it has format {found!r} (written by {writer}), but ROLL {__version__} supports formats "
                f"{OLDEST_FORMAT} to {FORMAT}. {_format_recovery_advice(found, by)}"
            )
        if found == 4 and "accuracies" in value:
            value = {**value, "scores": value["accuracies"]}
        value = {"unchanging": {}, **value}  # absent in files of older versions
        if isinstance(value.get("alarms"), dict):
            value = {**value, "alarms": rename_alarms(value["alarms"])}
        lacks = [each.name for each in fields(cls) if each.name not in value]
        if lacks:
            raise CheckpointVersionError(
                f"its state.json (written by {writer}) is missing {', '.join(map(repr, lacks))}, which ROLL "
                f"{__version__} requires. {_format_recovery_advice(None, by)}"
            )
        return cls(**{each.name: value[each.name] for each in fields(cls)})


def _format_recovery_advice(found_format: Any, roll_version: str) -> str:
    if isinstance(found_format, int) and found_format > FORMAT:
        return f"Upgrade: pip install '{DISTRIBUTION}{f'>={roll_version}' if roll_version else ''}' --upgrade."
    install = f"pip install '{DISTRIBUTION}=={roll_version}'" if roll_version else "install the version that wrote it"
    return f"Resume it with that version ({install}), or train a new run from its model: model=CHECKPOINT/model."
