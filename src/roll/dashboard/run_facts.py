"""The data of a run from which answers to questions are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.dashboard.health import Alarm, LedgerEntry
from roll.dashboard.metrics import MetricTable
from roll.dashboard.rollouts import Rollouts
from roll.dashboard.settings import to_finite_number
from roll.dashboard.trace import TracedStep

__all__ = ["SUPERVISED_PIPELINES", "RunFacts"]

SUPERVISED_PIPELINES = ("sft", "preference", "reward_model", "distill_offline")
"""Pipelines that learn from fixed examples instead of rollouts."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The data of a run that is used to answer questions about the run."""

    status: str
    num_steps: float | None
    settings: Mapping[str, Any]
    train: MetricTable
    evaluation: MetricTable
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
    """Causes of answers without a reward, the most frequent first."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """`summary.json`; empty while the run is running, or if it was killed."""

    @property
    def pipeline_name(self) -> str:
        """Name of the pipeline."""
        return str(self.settings.get("pipeline") or "rlvr")

    @property
    def is_supervised(self) -> bool:
        """True if the run learns from fixed examples, so that it has no rewards."""
        return self.pipeline_name in SUPERVISED_PIPELINES

    @property
    def has_rollouts(self) -> bool:
        """True if rollouts were recorded."""
        return len(self.rollouts) > 0

    @property
    def last_step(self) -> int:
        """Number of the last recorded step; 0 before the first."""
        return self.train.steps[-1] if self.train.steps else 0

    @property
    def end_kind(self) -> str:
        """Reason for the end of the run: `finished`, `alarm`, `interrupted` or `error`; empty if unknown.

        Without a summary, the reason is derived from steps and alarms.
        """
        if kind := self._read_ending("kind"):
            return kind
        if self.status == "finished":
            return "finished"
        return "alarm" if self._find_stopping_alarms() else ""

    @property
    def end_message(self) -> str:
        """The message of the alarm or the error that ended the run; empty if there is none."""
        found = self._find_stopping_alarms()
        return self._read_ending("message") or (found[-1].message if found else "")

    def _read_ending(self, key: str) -> str:
        ending = self.summary.get("ending")
        found = ending.get(key) if isinstance(ending, Mapping) else None
        return found if isinstance(found, str) else ""

    @property
    def num_trained_steps(self) -> float | None:
        """Number of steps that updated the weights, according to the summary."""
        return to_finite_number(self.summary.get("num_trained_steps"))

    def _find_stopping_alarms(self) -> list[Alarm]:
        named = {value for key, value in self.settings.items() if key.startswith("alarms.stop_on.")}
        every = self.settings.get("alarms.action") == "stop"
        newest = [alarm for alarm in self.alarms if alarm.step in (self.last_step, None)]
        return [alarm for alarm in newest if every or alarm.alarm in named]

    def find_held_out_metric(self) -> tuple[str, float, float] | None:
        """Return the name of the held-out metric (`score`, `accuracy` or `loss`), and its first and last values.

        The result is `None` if no metric has two values.
        """
        for name in ("score", "accuracy", "loss"):
            values = [v for v in self.evaluation.columns.get(f"eval/{name}", ()) if math.isfinite(v)]
            if len(values) > 1:
                return name, values[0], values[-1]
        return None

    def compute_mean(self, name: str, rows: slice = slice(None)) -> float | None:
        """Compute the mean of a metric over a slice of the training steps; `None` if there is no value."""
        values = np.array(self.train.columns.get(name, ()), dtype=np.float64)[rows]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None

    def get_number(self, key: str) -> float | None:
        """Return the value of a key of the configuration; `None` if it is not a finite number."""
        return to_finite_number(self.settings.get(key))

    def find_maximum(self, name: str) -> float | None:
        """Return the largest value of a metric in training steps; `None` if there is no value."""
        values = [value for value in self.train.columns.get(name, ()) if math.isfinite(value)]
        return max(values, default=None)
