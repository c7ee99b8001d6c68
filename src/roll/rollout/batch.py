"""`BatchSpec`, the settings of a run's batches, and `Batch`, the groups of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from roll.rollout.attempts import SamplingPlan
from roll.rollout.group_run import EarlyStopPredicate
from roll.rollout.selection_bias import SelectionBias
from roll.types import Group, PromptDraw

__all__ = ["Batch", "BatchSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Prompt source, sampling plans, size and filters of batches."""

    draw: Callable[[int, str | None], Sequence[PromptDraw]]
    """Samples the next prompts, optionally from one domain, and records them in the ledger."""
    plans: tuple[SamplingPlan, ...]
    """Sampling plan of the group, then the plans of its companion groups."""
    batch_size: int
    """Groups per step, N."""
    num_steps: int | None = None
    """Number of batches of the run; groups that no remaining step can train are not launched."""
    get_rejection_reason: Callable[[Group], str] | None = None
    """Returns the reason why a filter rejects a group, '' if it passes; `None` if rejected groups are not replaced."""
    max_refills: int = 0
    """Maximum number of replacement groups per step, as a multiple of N."""
    early_stop: EarlyStopPredicate | None = None
    """Predicate that returns whether a group can no longer pass the filters."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the domains if they are trained in fixed proportions (`Quotas`); empty if the mix is not fixed."""
    num_allocated: int = 0
    """Number of training slots that an earlier process allocated to the domains."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """The groups of a step, and the outcomes of all other draws since the last step."""

    groups: list[Group] = field(default_factory=list)
    """Groups to train, and groups that a filter rejected (see `rejection_reasons`), sorted by draw id."""
    companions: dict[str, list[Group]] = field(default_factory=dict)
    """Companion groups of the same draws, by purpose."""
    rejection_reasons: dict[int, str] = field(default_factory=dict)
    """Reason why a filter rejected the group, by draw id; rejected groups are not trained."""
    expired: dict[int, str] = field(default_factory=dict)
    """Reason why a draw will never be trained, by draw id."""
    expired_lengths: list[int] = field(default_factory=list)
    """Lengths of the finished rollouts of expired groups, in tokens."""
    num_refills: int = 0
    """Number of groups that were launched to replace groups that a filter rejected."""
    kind: str = ""
    """Type of round: `short`, `long` or `last` with tail batching, otherwise empty."""
    staleness: list[int] = field(default_factory=list)
    """Staleness in policy versions of each group to train, measured from the start of its first rollout."""
    selection_bias: SelectionBias | None = None
    """Statistics of counted and launched rollouts; `None` if the scheduling does not choose among rollouts."""

    def add_companions(self, groups: Mapping[str, Group]) -> None:
        """Add the companion groups of a draw, by purpose."""
        for purpose, group in groups.items():
            self.companions.setdefault(purpose, []).append(group)
