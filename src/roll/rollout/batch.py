"""Specification of a run's batches, and the batch that a step gets."""

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
    """Prompt source, sampling plans, size and filters of the controller's batches."""

    draw: Callable[[int, str | None], Sequence[PromptDraw]]
    """Returns the next prompts, optionally of one domain; the caller records the draws in the ledger."""
    plans: tuple[SamplingPlan, ...]
    """Sampling plan of a group, then those of its companions."""
    batch_size: int
    """Groups per step, N."""
    num_steps: int | None = None
    """Number of batches of the run; nothing is launched that no step could train."""
    left_out: Callable[[Group], str] | None = None
    """Returns why a filter leaves a group out, empty if it passes; set if groups that are left out are replaced."""
    max_refills: int = 0
    """Replacement groups that a step may launch, as a multiple of N."""
    early_stop: EarlyStopPredicate | None = None
    """Predicate that tells whether a group can no longer pass the filters."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the domains if they are trained in fixed proportion (`Quotas`); empty if the mix is free."""
    num_dealt: int = 0
    """Places in training that an earlier process dealt to the domains."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """The groups of a step, and the outcome of all other draws since the last step."""

    groups: list[Group] = field(default_factory=list)
    """Groups to train, and the groups in `left_out`; by draw id."""
    companions: dict[str, list[Group]] = field(default_factory=dict)
    """Companion groups of the same draws, by purpose."""
    left_out: dict[int, str] = field(default_factory=dict)
    """By draw id: why a group that was replaced by another one is not trained."""
    expired: dict[int, str] = field(default_factory=dict)
    """By draw id: why a draw will never be trained."""
    expired_lengths: list[int] = field(default_factory=list)
    """Lengths in tokens of finished rollouts that were discarded with their groups."""
    num_refills: int = 0
    """Number of replacement groups."""
    kind: str = ""
    """Kind of round: `short`, `long` or `last` with tail batching, otherwise empty."""
    staleness: list[int] = field(default_factory=list)
    """Staleness of each group in policy versions, from its first rollout's begin."""
    census: SelectionBias | None = None
    """Statistics of counted and launched rollouts, if the scheduling chooses among rollouts."""
