"""Record types of a recording: sessions, steps, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roll.types import Group, Rollout, RolloutId

__all__ = ["FORMAT", "RecordedDraw", "RecordedRequest", "RecordedSession", "RecordedStep", "RecordedTransition"]

FORMAT = 1
"""Version of the file format; readers reject other versions."""


class RecordedTransition(NamedTuple):
    """One state transition of a rollout (`roll.rollout.lifecycle`)."""

    time_s: float
    """Seconds since the session began."""
    rollout_id: RolloutId
    before: str
    """State before the transition; empty when the rollout begins."""
    after: str
    detail: str
    """The engine's id, or the reason."""


class RecordedRequest(NamedTuple):
    """One request to the model; continuations and retries are treated as the same request."""

    request_id: str
    """Id of the engine request: `RolloutId.request_id`, unless a user-defined loop set another id."""
    engine_id: str
    """ID of the last engine that served the request; empty if no engine did."""
    queued_s: float
    started_s: float
    """Time at which the first engine received the request; -1 if no engine did."""
    ended_s: float
    num_prompt: int
    """Number of prompt tokens."""
    num_tokens: int
    """Number of generated tokens; -1 if the caller was canceled or the engine failed."""
    finish_reason: str
    """`stop`, `length` or `abort`; `cancelled` if the caller was canceled, `failed` if no engine succeeded."""


class RecordedDraw(NamedTuple):
    """A draw, and the step for which the ledger opened it."""

    draw_id: int
    uid: str
    step: int
    """Step for which the draw was opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSession:
    """One session of a run, which begins when the run starts or resumes, with the data that all of its steps share."""

    number: int
    """Number of the session, from 1."""
    step: int
    """Number of steps completed before the session."""
    started: float
    """Start of the session, as Unix time in seconds; the times of all its steps are relative to it."""
    version: str
    """Version of ROLL that wrote the session."""
    config: Mapping[str, Any]
    """Resolved configuration."""
    model: str
    """Fingerprint of the run's initial weights."""
    tokenizer: str
    """Fingerprint of vocabulary and chat template."""
    stream: Mapping[str, Any]
    """State of the prompt stream (`PromptStream.state()`)."""
    num_draws: int
    pending: tuple[tuple[int, str, int], ...] = ()
    """Draws in flight, as (draw id, domain, position)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One step of a run. For prompts, only UID and domain are stored; the content is read from the data source."""

    step: int
    session: int
    policy_version: int
    """Policy version before the step's update; the trained tokens have at most this version."""
    next_policy_version: int
    """Policy version after the step's update."""
    groups: tuple[Group, ...]
    """All groups of the batch, including replaced groups."""
    companions: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)
    """Companion groups by purpose, such as greedy answers."""
    demonstrations: tuple[Rollout, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Reasons why groups of the batch were replaced, by draw ID."""
    expired: Mapping[int, str] = field(default_factory=dict)
    """Reasons why draws will never be trained, by draw ID."""
    expired_lengths: tuple[int, ...] = ()
    """Lengths in tokens of finished rollouts that were discarded with their groups."""
    num_refills: int = 0
    """Number of replacement groups."""
    kind: str = ""
    """Type of the batch's round: `short`, `long` or `last` with tail batching, otherwise empty."""
    staleness: tuple[int, ...] = ()
    """Staleness of each trained group, in policy versions."""
    selection_bias: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of selected and launched rollouts (fields of `SelectionBias`), if the schedule selects rollouts."""
    draws: tuple[RecordedDraw, ...] = ()
    """Draws that were opened since the last step's boundary."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """State of the prompt stream at the step's boundary."""
    num_draws: int = 0
    """Number of draws up to the boundary."""
    pending: tuple[tuple[int, str, int], ...] = ()
    """Draws in flight at the boundary, as (draw id, domain, position)."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counts of engines and requests over the session: replaced, reissued, continued."""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the step, and of the `step`."""
    transitions: tuple[RecordedTransition, ...] = ()
    """State transitions since the last boundary."""
    requests: tuple[RecordedRequest, ...] = ()
    """Requests that ended since the last boundary."""
