"""The known data of a run, from its files, with which questions are answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.dashboard.health import Alarm, LedgerEntry
from roll.dashboard.metrics import Table
from roll.dashboard.rollouts import Rollouts
from roll.dashboard.settings import usual_number
from roll.dashboard.trace import TracedStep

__all__ = ["SUPERVISED", "RunFacts"]

SUPERVISED = ("sft", "preference", "reward_model", "distill_offline")
"""Pipelines that learn from given examples."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The known data of a run."""

    status: str
    num_steps: float | None
    settings: Mapping[str, Any]
    train: Table
    evaluation: Table
    rollouts: Rollouts
    ledger: Sequence[LedgerEntry]
    """Entries of the newest checkpoint's ledger."""
    alarms: Sequence[Alarm]
    log: Sequence[str]
    steps: Sequence[TracedStep]
    """Phases of each step, from the trace."""
    plans: Sequence[Mapping[str, Any]]
    others: Sequence[tuple[str, str, int]]
    """Id, name and number of differing keys of each other run."""
    run: str
    """The run's id."""
    files_left: int = 0
    """Number of rollout files that are not read yet."""
    failures: Sequence[Mapping[str, Any]] = ()
    """Why answers got no reward, the most frequent cause first."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """`summary.json`; empty while the run is running, or if it was killed."""

    @property
    def pipeline(self) -> str:
        """Name of the pipeline."""
        return str(self.settings.get("pipeline") or "rlvr")

    @property
    def is_supervised(self) -> bool:
        """Whether the run learns from given examples, so that it has no rewards."""
        return self.pipeline in SUPERVISED

    @property
    def has_rollouts(self) -> bool:
        """Whether rollouts were recorded."""
        return len(self.rollouts) > 0

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return self.train.steps[-1] if self.train.steps else 0

    @property
    def end_kind(self) -> str:
        """How the run ended according to its summary or, for older versions, its steps and alarms; empty if unknown."""
        if kind := self._ending("kind"):
            return kind
        if self.status == "finished":
            return "finished"
        return "alarm" if self._stopping_alarms() else ""

    @property
    def end_message(self) -> str:
        """The message of the alarm or the error that ended the run."""
        found = self._stopping_alarms()
        return self._ending("message") or (found[-1].message if found else "")

    def _ending(self, key: str) -> str:
        ending = self.summary.get("ending")
        found = ending.get(key) if isinstance(ending, Mapping) else None
        return found if isinstance(found, str) else ""

    @property
    def num_trained_steps(self) -> float | None:
        """Number of steps that updated the weights, according to the summary."""
        return usual_number(self.summary.get("num_trained_steps"))

    def _stopping_alarms(self) -> list[Alarm]:
        named = {value for key, value in self.settings.items() if key.startswith("alarms.stop_on.")}
        every = self.settings.get("alarms.action") == "stop"
        newest = [alarm for alarm in self.alarms if alarm.step in (self.step, None)]
        return [alarm for alarm in newest if every or alarm.alarm in named]

    def held_out(self) -> tuple[str, float, float] | None:
        """Return the name of the held-out measure with its first and last value; `None` with fewer than two."""
        for name in ("score", "accuracy", "loss"):
            values = [v for v in self.evaluation.columns.get(f"eval/{name}", ()) if math.isfinite(v)]
            if len(values) > 1:
                return name, values[0], values[-1]
        return None

    def mean(self, name: str, rows: slice = slice(None)) -> float | None:
        """Return the mean of a metric over some steps; `None` if the metric does not exist."""
        values = np.array(self.train.columns.get(name, ()), dtype=np.float64)[rows]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None

    def number(self, key: str) -> float | None:
        """Return the value of a key of the configuration, if it is a number."""
        return usual_number(self.settings.get(key))

    def most(self, name: str) -> float | None:
        """Return the largest value of a metric."""
        values = [value for value in self.train.columns.get(name, ()) if math.isfinite(value)]
        return max(values, default=None)
