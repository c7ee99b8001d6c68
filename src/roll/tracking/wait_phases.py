"""Split the time of waiting for rollouts into waiting for the model, for environments, and for rewards.

    generate │ generate │ environment │ generate │ reward │ reward ─► batch

While the model generates for at least one rollout, the time is attributed to the model. While it generates for
no rollout and an environment acts, the time is attributed to environments. While all running rollouts wait for
a verdict, the time is attributed to rewards, including queues and retries. The parts add up to the whole wait.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from roll.tracking.rollout_trace import Transition
from roll.tracking.spans import Spans
from roll.types import RolloutId

__all__ = ["WaitPhases"]

_GENERATION_STATES = ("queued", "generating")


@dataclass(eq=False)
class WaitPhases:
    """Splits the time that a step waits for rollouts into phases: by generation, environments and rewards."""

    spans: Spans
    """Spans of the run."""
    ignored_purpose: str = "eval"
    """Purpose of rollouts for which no step waits."""
    _stage: dict[RolloutId, str] = field(init=False, default_factory=dict)
    """Stage of each rollout: `model` or `reward`."""
    _counts: Counter[str] = field(init=False, default_factory=Counter)
    _num_acting: int = field(init=False, default=0)
    """Number of environments that currently act; their rollouts have the stage `model`."""
    _generation_phase: str | None = field(init=False, default=None)
    """Name of the model's phase; `None` while no step waits."""

    def on_transition(self, event: Transition) -> None:
        """Record a rollout's state change; a listener of `LifeCycle`."""
        name = event.rollout_id
        if name.purpose == self.ignored_purpose:
            return
        before = self._stage.pop(name, None)
        repeated = event.after == "queued" and before == "reward"  # the answer exists: only its scoring is repeated
        after = (
            "reward"
            if event.after == "rewarding" or repeated
            else "model"
            if event.after in _GENERATION_STATES
            else None
        )
        self._counts[before or ""] -= 1
        self._counts[after or ""] += 1
        if after is not None:
            self._stage[name] = after
        self._update_phase()

    def record_environment_activity(self, change: int) -> None:
        """Record that an environment begins to act (`change` is 1) or is done (-1)."""
        self._num_acting += change
        self._update_phase()

    @contextlib.contextmanager
    def measure_wait(self, generation_phase: str) -> Iterator[None]:
        """Measure the phases of a `with` block that waits for rollouts; generation is the phase `generation_phase`."""
        self._generation_phase = generation_phase
        self._open = self.spans.begin(self._choose_phase())
        try:
            with self.spans.use_parent(self._open):
                yield
        finally:
            self._generation_phase = None
            self.spans.end(self._open)

    def _choose_phase(self) -> str:
        assert self._generation_phase is not None
        if self._num_acting and self._counts["model"] <= self._num_acting:
            return "environment"
        return "reward" if self._counts["reward"] and not self._counts["model"] else self._generation_phase

    def _update_phase(self) -> None:
        if self._generation_phase is not None and self._choose_phase() != self._open.name:
            self._open = self.spans.replace_span(self._open, self._choose_phase())
