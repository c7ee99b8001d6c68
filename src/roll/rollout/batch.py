"""The batches of a run: what each is made of, and what a step gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from roll.rollout.attempts import SamplingPlan
from roll.rollout.census import Census
from roll.rollout.group_run import Doom
from roll.types import Group, PromptDraw

__all__ = ["Batch", "BatchSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """What the controller makes batches of, and what it asks of finished groups."""

    draw: Callable[[int, str | None], Sequence[PromptDraw]]
    """The next prompts, of one domain if it is given; recorded in the ledger by the caller."""
    plans: tuple[SamplingPlan, ...]
    """Of a group and its companions."""
    batch_size: int
    """Groups per step, N."""
    num_steps: int | None = None
    """Batches that will be asked for; nothing is launched that no step could train."""
    left_out: Callable[[Group], str] | None = None
    """Why a filter leaves a group out, empty if it passes; given where another group takes its place."""
    max_refills: int = 0
    """Groups that may take others' places, in each step, as a multiple of N."""
    doomed: Doom | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the domains, where they are trained in this proportion (`Quotas`); none: the mix is free."""
    num_dealt: int = 0
    """Places in training that an earlier process dealt out to the domains."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """What a step gets, and what became of everything else since the last one."""

    groups: list[Group] = field(default_factory=list)
    """To be trained, and those in `left_out`; by draw id."""
    companions: dict[str, list[Group]] = field(default_factory=dict)
    """By purpose, of the same draws."""
    left_out: dict[int, str] = field(default_factory=dict)
    """By draw id, why a group that was replaced by another one is not trained."""
    expired: dict[int, str] = field(default_factory=dict)
    """By draw id, why a draw will never be trained."""
    expired_lengths: list[int] = field(default_factory=list)
    """Tokens of finished rollouts that were thrown away with their groups."""
    num_refills: int = 0
    kind: str = ""
    """Of the round: `short`, `long` or `last` with tail batching, otherwise empty."""
    staleness: list[int] = field(default_factory=list)
    """Of each group, in policy versions, by when it began."""
    census: Census | None = None
    """What counts beside what was launched, where the policy chooses among rollouts."""
