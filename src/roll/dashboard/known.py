"""What is known of a run when people ask about it: all from its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll.dashboard.metrics import Table
from roll.dashboard.rollouts import Rollouts
from roll.dashboard.settings import usual_number

__all__ = ["Known"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run."""

    status: str
    num_steps: float | None
    settings: Mapping[str, Any]
    train: Table
    rollouts: Rollouts
    ledger: Sequence[Mapping[str, Any]]
    """Entries of the newest checkpoint's."""
    alarms: Sequence[Mapping[str, Any]]
    log: Sequence[str]
    steps: Sequence[Mapping[str, Any]]
    """Phases of each, from the trace."""
    plans: Sequence[Mapping[str, Any]]
    others: Sequence[tuple[str, str, int]]
    """Id, name and number of keys that differ, of each other run."""
    run: str
    """Its id."""
    files_left: int = 0
    """Of rollouts, that are still to be read."""

    def mean(self, name: str, rows: slice = slice(None)) -> float | None:
        """Of a metric over some steps; `None` where it is not there."""
        values = np.array(self.train.columns.get(name, ()), dtype=np.float64)[rows]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None

    def number(self, key: str) -> float | None:
        """The value of a key of the configuration, where it is a number."""
        return usual_number(self.settings.get(key))

    def most(self, name: str) -> float | None:
        """The largest value of a metric."""
        values = [value for value in self.train.columns.get(name, ()) if math.isfinite(value)]
        return max(values, default=None)
