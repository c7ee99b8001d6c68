"""What a run must remember between steps, besides weights: the controller's part of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from roll.algorithms.normalise import Moments
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
    """Updates that the engines got; a step without gradient leaves it."""
    data: dict[str, Any] = field(default_factory=dict)
    """Cursor of the prompt stream (`PromptStream.state()`)."""
    num_draws: int = 0
    """Draws up to the boundary; the ledger's later ones are forgotten when the run resumes."""
    pending: list[list[Any]] = field(default_factory=list)
    """Draws in flight at the boundary, as [draw id, domain, position]: a resumed run launches them first."""
    evaluated_at: int = -1
    """Step after which the policy was last evaluated; -1 for never."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of the evaluations that had answers, `eval/score` by step."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    first_lengths: list[float] = field(default_factory=list)
    """Mean length of answers in each of the first steps, in tokens, as the measure for later ones."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Of all rewards so far, by domain, for running normalisation."""
    kl_coefficient: float | None = None
    """Where the KL penalty's coefficient adapts: its value for the next step."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Steps in a row for each alarm."""
    failures: list[list[int]] = field(default_factory=list)
    """Of the last steps, how many answers were asked for, failed, and timed out (`Failures.counts`)."""
    verifiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What rewards remember that later judgements depend on, by domain and component (`WeightedReward.state()`)."""
    best_step: int | None = None
    """Step, after the first update, with the best evaluation score (the earliest of equals)."""

    def note_score(self, step: int, score: float) -> None:
        """Remember an evaluation's score, of which more is better. The model before training is no candidate for the
        best: where it is as good as any, the best that training made is kept.
        """
        best = max((found for at, found in self.scores.items() if at != "0"), default=float("-inf"))
        self.scores[str(step)] = score
        if step > 0 and score > best:
            self.best_step = step

    def to_json(self) -> dict[str, Any]:
        """Plain data with a format number."""
        moments = {domain: value.to_json() for domain, value in self.moments.items()}
        return {"format": FORMAT, **asdict(self), "moments": moments}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunState:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: it was written by an incompatible version.
        """
        fields = dict(value)
        found = fields.pop("format", None)
        if found not in _READABLE:
            raise CheckpointError(f"state.json has format {found!r}, this version of ROLL reads {FORMAT}")
        if found == 4:
            fields["scores"] = fields.pop("accuracies")
        try:
            moments = {domain: Moments.from_json(m) for domain, m in fields.pop("moments").items()}
            return cls(**fields, moments=moments)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"state.json does not have the expected fields: {error}") from None
