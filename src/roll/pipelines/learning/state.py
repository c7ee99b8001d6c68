"""The state that a run keeps between steps which learns from scored rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from roll.algorithms.normalise import Moments
from roll.pipelines.state import RunState

__all__ = ["LearningState"]


@dataclass(kw_only=True, slots=True)
class LearningState(RunState):
    """Where such a run stands at a step's boundary."""

    pending: list[list[Any]] = field(default_factory=list)
    """Draws in flight at the boundary, as [draw id, domain, position]: a resumed run launches them first."""
    first_lengths: list[float] = field(default_factory=list)
    """Mean length of answers in each of the first steps, in tokens, as the measure for later ones."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Of all rewards so far, by domain, for running normalisation."""
    kl_coefficient: float | None = None
    """Where the KL penalty's coefficient adapts: its value for the next step."""
    failures: list[list[int]] = field(default_factory=list)
    """Of the last steps, how many answers were asked for, failed, and timed out (`Failures.counts`)."""
    verifiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What rewards remember that later judgements depend on, by domain and component (`WeightedReward.state()`)."""

    def to_json(self) -> dict[str, Any]:
        """See `RunState.to_json`."""
        moments = {domain: found.to_json() for domain, found in self.moments.items()}
        return {**super(LearningState, self).to_json(), "moments": moments}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """See `RunState.from_json`."""
        state = super(LearningState, cls).from_json(value)  # with slots, `super()` means the class before they came
        state.moments = {domain: Moments.from_json(found) for domain, found in value["moments"].items()}
        return state
