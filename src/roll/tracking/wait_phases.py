"""What a wait for rollouts is spent on: the model, its environments, or rewards.

    generate │ generate │ environment │ generate │ reward │ reward ─► batch

If the model generates for at least one rollout, the wait is for the model; if it generates for none and environments
act, the wait is for environments; if all running rollouts wait for a verdict, it is for the reward, including time in
queues and in retries. The parts add up to the wait: nothing is counted twice, however many rollouts wait.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from roll.tracking.rollout_trace import Move
from roll.tracking.spans import Spans
from roll.types import RolloutId

__all__ = ["WaitPhases"]

_WAITING = ("queued", "generating")


@dataclass(eq=False)
class WaitPhases:
    """Divides a phase of `spans` by the current activity of rollouts."""

    spans: Spans
    """Spans of the run."""
    ignored: str = "eval"
    """Purpose of rollouts that no step waits for."""
    _stage: dict[RolloutId, str] = field(init=False, default_factory=dict)
    """Stage of each rollout: `model` or `reward`."""
    _counts: Counter[str] = field(init=False, default_factory=Counter)
    _num_acting: int = field(init=False, default=0)
    """Number of environments that act now; their rollouts would otherwise count as the model's."""
    _first: str | None = field(init=False, default=None)
    """Name of the model's phase; `None` while no step waits."""

    def on_transition(self, event: Move) -> None:
        """Record a transition, as a listener of a life cycle; returns immediately."""
        name = event.rollout_id
        if name.purpose == self.ignored:
            return
        before = self._stage.pop(name, None)
        repeated = event.after == "queued" and before == "reward"  # the answer exists: only its scoring is repeated
        after = "reward" if event.after == "rewarding" or repeated else "model" if event.after in _WAITING else None
        self._counts[before or ""] -= 1
        self._counts[after or ""] += 1
        if after is not None:
            self._stage[name] = after
        self._shift()

    def environment(self, change: int) -> None:
        """Record that an environment begins to act (1) or is done (-1)."""
        self._num_acting += change
        self._shift()

    @contextlib.contextmanager
    def waiting(self, first: str) -> Iterator[None]:
        """Measure the body as a wait for rollouts; while the model generates, it is a phase called `first`."""
        self._first = first
        self._open = self.spans.begin(self._name())
        try:
            with self.spans.inside(self._open):
                yield
        finally:
            self._first = None
            self.spans.end(self._open)

    def _name(self) -> str:
        assert self._first is not None
        if self._num_acting and self._counts["model"] <= self._num_acting:
            return "environment"
        return "reward" if self._counts["reward"] and not self._counts["model"] else self._first

    def _shift(self) -> None:
        if self._first is not None and self._name() != self._open.name:
            self._open = self.spans.follow(self._open, self._name())
