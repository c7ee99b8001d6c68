"""ScoringGate: with the scheduling type `batch`, no rollout is scored before all rollouts of a round are generated."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from roll.rollout.lifecycle import LifeCycle, RolloutState, Transition

__all__ = ["ScoringGate"]

_GENERATING = (RolloutState.QUEUED, RolloutState.GENERATING)


class ScoringGate:
    """Counts the rollouts that are being generated; `opened` is set when none is left.

    Args:
        lifecycle: Life cycle of the rollouts.
        purposes: Purposes of the rollouts to count.
    """

    def __init__(self, lifecycle: LifeCycle, purposes: Collection[str]) -> None:
        self.opened = asyncio.Event()
        self._purposes = purposes
        self._num_generating = 0
        lifecycle.add_listener(self._on_transition)

    def add(self, count: int) -> None:
        """Add launched rollouts, and close the gate."""
        self.opened.clear()
        self._num_generating += count

    def _on_transition(self, event: Transition) -> None:
        """Update the count after a rollout's transition, and open the gate if no rollout is left."""
        if event.rollout_id.purpose not in self._purposes:
            return
        if event.before in _GENERATING and event.after not in _GENERATING:
            self._num_generating -= 1
            if self._num_generating == 0:
                self.opened.set()
        elif event.before not in (None, *_GENERATING) and event.after in _GENERATING:
            self._num_generating += 1
