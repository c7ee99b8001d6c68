"""The records of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roll.types import Group, Rollout, RolloutId

__all__ = ["FORMAT", "Move", "RecordedDraw", "RecordedStep", "Request", "Session"]

FORMAT = 1
"""Of the files; a reader refuses any other."""


class Move(NamedTuple):
    """One change of state of one rollout; see `roll.rollout.lifecycle`."""

    time_s: float
    """Since the session began."""
    rollout_id: RolloutId
    before: str
    """Empty at its beginning."""
    after: str
    detail: str
    """The engine, or the reason."""


class Request(NamedTuple):
    """One call of the model, as its caller saw it: resumptions and repetitions are inside."""

    request_id: str
    """As engines saw it: `RolloutId.request_id`, unless a loop of the user's own gave another one."""
    engine_id: str
    """That had it last; empty where none had it."""
    queued_s: float
    started_s: float
    """When an engine first had it; -1 where none had it."""
    ended_s: float
    num_prompt: int
    """Tokens."""
    num_tokens: int
    """Generated; -1 where its caller gave it up or its engine failed it."""
    finish_reason: str
    """`stop`, `length`, `abort`; `cancelled` where its caller gave it up, `failed` where no engine could."""


class RecordedDraw(NamedTuple):
    """A draw that was opened in the ledger."""

    draw_id: int
    uid: str
    step: int
    """For which it was drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """From a start, or a resumption, of the run to its end: what its steps have in common."""

    number: int
    """From 1."""
    step: int
    """Steps that were done before."""
    started: float
    """Seconds since 1970; all times of its steps count from here."""
    version: str
    """The version of ROLL that wrote it."""
    config: Mapping[str, Any]
    """Resolved."""
    model: str
    """Fingerprint of the weights that the run began with."""
    tokenizer: str
    """Fingerprint of vocabulary and chat template."""
    stream: Mapping[str, Any]
    """Where the prompt stream stood (`PromptStream.state()`)."""
    num_draws: int
    pending: tuple[tuple[int, str, int], ...] = ()
    """Draws in flight, as (draw id, domain, position)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One step of a run. Prompts are bare: their uid and domain; everything else is in the data."""

    step: int
    session: int
    policy_version: int
    """Before the step's update: that of the newest tokens that it could train."""
    next_policy_version: int
    """After it."""
    groups: tuple[Group, ...]
    """All of the batch, those that were left out too."""
    companions: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)
    """By purpose, such as greedy answers."""
    demonstrations: tuple[Rollout, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)
    """By draw id, why a group of the batch was replaced by another one."""
    expired: Mapping[int, str] = field(default_factory=dict)
    """By draw id, why it will never be trained."""
    expired_lengths: tuple[int, ...] = ()
    """Tokens of finished rollouts that were given up with their groups."""
    num_refills: int = 0
    kind: str = ""
    """Of the round that made the batch: `short`, `long` or `last` with tail batching, otherwise empty."""
    staleness: tuple[int, ...] = ()
    """Of each trained group, in policy versions."""
    census: Mapping[str, Any] = field(default_factory=dict)
    """What counts beside what was launched, where the policy chose (the fields of `Census`)."""
    draws: tuple[RecordedDraw, ...] = ()
    """Opened since the last step's boundary."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """The prompt stream at the step's boundary."""
    num_draws: int = 0
    """Up to the boundary."""
    pending: tuple[tuple[int, str, int], ...] = ()
    """In flight at the boundary, as (draw id, domain, position)."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Of engines, over the session: replaced, reissued, continued."""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the step, and of the `step`."""
    moves: tuple[Move, ...] = ()
    """Since the last boundary."""
    requests: tuple[Request, ...] = ()
    """That ended since the last boundary."""
