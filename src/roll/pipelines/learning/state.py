"""State between steps of a run that trains on scored rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from roll.algorithms.normalization import Moments
from roll.pipelines.state import RunState

__all__ = ["LearningState"]


@dataclass(kw_only=True, slots=True)
class LearningState(RunState):
    """State of a run that trains on scored rollouts, at a step's boundary."""

    pending: list[list[Any]] = field(default_factory=list)
    """Draws in flight at the boundary, as [draw id, domain, position]: a resumed run launches them first."""
    first_lengths: list[float] = field(default_factory=list)
    """Mean answer length in tokens of each of the first steps, the baseline of later steps."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Moments of all rewards so far, by domain, for running normalization."""
    kl_coefficient: float | None = None
    """Adaptive KL coefficient of the next step; `None` if it is constant."""
    failures: list[list[int]] = field(default_factory=list)
    """`FailureCounts.counts` of the last steps: the numbers of judged, failed and timed-out answers."""
    verifiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of stateful rewards, by domain and component (`WeightedReward.state()`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON-serializable data, including the reward moments."""
        moments = {domain: found.to_json() for domain, found in self.moments.items()}
        return {**super(LearningState, self).to_json(), "moments": moments}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build the state from the data that `to_json` returned.

        Raises:
            CheckpointVersionError: Another version of ROLL wrote the data, and this version cannot read it.
        """
        state = super(LearningState, cls).from_json(value)  # with slots, `super()` is the class without them
        state.moments = {domain: Moments.from_json(found) for domain, found in value["moments"].items()}
        return state
