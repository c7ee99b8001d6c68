"""The life cycle of rollouts: a state machine that reports every transition as an event.

    queued ──► generating ──► rewarding ──► accepted ──► trained
      │  ◄──(again)── │  ◄──(again)── │         ├──► measured   (of an evaluation)
      └───────────────┴───────────────┴─────────┴──► filtered | expired | aborted | infra_error

Invariants, checked on every transition:
    - a rollout that fails while queued (in its environment, or before an engine has its request) is queued again;
    - a rollout begins in state `queued` and ends in exactly one final state: no rollout is lost or ends twice;
    - only the transitions in `ALLOWED_TRANSITIONS` occur: a rollout is generated before it is scored, and scored before
      it is trained;
    - the number of live rollouts is the number that began minus the number that ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from roll.types import RolloutId

__all__ = ["ALLOWED_TRANSITIONS", "FINAL_STATES", "LifeCycle", "LiveRollout", "RolloutState", "Transition"]


class RolloutState(StrEnum):
    """State of a rollout."""

    QUEUED = "queued"
    """Waits for an engine slot."""
    GENERATING = "generating"
    REWARDING = "rewarding"
    ACCEPTED = "accepted"
    """Scored; waits for its group and its step."""
    TRAINED = "trained"
    MEASURED = "measured"
    """Counted in an evaluation."""
    FILTERED = "filtered"
    """Scored, but rejected by a filter."""
    EXPIRED = "expired"
    """Too old to be trained."""
    ABORTED = "aborted"
    """Stopped because its result is not needed."""
    INFRA_ERROR = "infra_error"
    """Failed in all attempts because of infrastructure errors."""


_S = RolloutState
_DISCARDED_STATES = frozenset({_S.EXPIRED, _S.ABORTED, _S.INFRA_ERROR})
ALLOWED_TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    # A rollout that fails before an engine has its request is queued again.
    _S.QUEUED: frozenset({_S.GENERATING, _S.QUEUED}) | _DISCARDED_STATES,
    _S.GENERATING: frozenset({_S.REWARDING, _S.QUEUED}) | _DISCARDED_STATES,
    _S.REWARDING: frozenset({_S.ACCEPTED, _S.QUEUED}) | _DISCARDED_STATES,
    _S.ACCEPTED: frozenset({_S.TRAINED, _S.MEASURED, _S.FILTERED, _S.EXPIRED, _S.ABORTED}),
}
"""Allowed next states of each live state; a state that is not a key is final."""
FINAL_STATES = frozenset(_S) - frozenset(ALLOWED_TRANSITIONS)


@dataclass(frozen=True, slots=True)
class Transition:
    """A rollout's change of state from `before` to `after`; `before` is `None` when the rollout begins."""

    rollout_id: RolloutId
    before: RolloutState | None
    after: RolloutState
    time: float
    """Time of the running loop, in seconds."""
    detail: str = ""
    """Id of the engine, or reason for the transition."""


@dataclass(slots=True)
class LiveRollout:
    """A rollout that has not ended."""

    rollout_id: RolloutId
    state: RolloutState
    entered_at: float
    """Time of the event loop at which the rollout entered this state."""
    began_at: float
    detail: str = ""


class LifeCycle:
    """Tracks the state of every rollout.

    Args:
        listeners: Called with every transition, in order; must not block.
    """

    def __init__(self, *listeners: Callable[[Transition], None]) -> None:
        self._listeners = list(listeners)
        self._live: dict[RolloutId, LiveRollout] = {}
        self.last_move = -math.inf
        """Time of the latest transition."""
        self.totals: Counter[RolloutState] = Counter()
        """Number of times each state was entered."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRollout]:
        """Iterate over live rollouts, in the order in which they began."""
        return iter(self._live.values())

    def add_listener(self, listener: Callable[[Transition], None]) -> None:
        """Call `listener` with every later transition, after the earlier listeners; it must not block."""
        self._listeners.append(listener)

    def begin(self, rollout_id: RolloutId) -> None:
        """Add a rollout in state `queued`."""
        assert rollout_id not in self._live, f"rollout {rollout_id} begins twice"
        now = asyncio.get_running_loop().time()
        self._live[rollout_id] = LiveRollout(rollout_id, RolloutState.QUEUED, now, now)
        self._notify(rollout_id, None, RolloutState.QUEUED, now, "")

    def move(self, rollout_id: RolloutId, state: RolloutState, detail: str = "") -> None:
        """Move a rollout to the state `state`; after a final state, it is no longer tracked."""
        rollout = self._live.get(rollout_id)
        assert rollout is not None, f"rollout {rollout_id} is not live, so it cannot become {state}"
        before = rollout.state
        # Checked here, because otherwise a rollout that is lost or counted twice would only show as a stalled step.
        assert state in ALLOWED_TRANSITIONS[before], f"rollout {rollout_id} cannot go from {before} to {state}"
        now = asyncio.get_running_loop().time()
        if state in ALLOWED_TRANSITIONS:
            rollout.state, rollout.entered_at, rollout.detail = state, now, detail
        else:
            del self._live[rollout_id]
        self._notify(rollout_id, before, state, now, detail)

    def get_state(self, rollout_id: RolloutId) -> RolloutState | None:
        """Return the state of a rollout; `None` once it has ended."""
        rollout = self._live.get(rollout_id)
        return rollout.state if rollout else None

    def count_by_state(self) -> dict[RolloutState, int]:
        """Return the number of live rollouts by state."""
        return Counter(rollout.state for rollout in self._live.values())

    def _notify(
        self, rollout_id: RolloutId, before: RolloutState | None, after: RolloutState, now: float, detail: str
    ) -> None:
        self.last_move = now
        self.totals[after] += 1
        if self._listeners:
            event = Transition(rollout_id, before, after, now, detail)
            for listener in self._listeners:
                listener(event)
