"""Everything that a run records, and everything that its user sees.

Importing this imports none of torch, rich, pyarrow, matplotlib, tensorboard: each is imported where it is
first needed.
"""

from roll.tracking.metrics_file import look_at_metrics, read_metrics
from roll.tracking.run_directory import RunDirectory
from roll.tracking.spans import Spans
from roll.tracking.summary import Summary
from roll.tracking.tracker import Tracker

__all__ = [
    "RunDirectory",
    "Spans",
    "Summary",
    "Tracker",
    "look_at_metrics",
    "read_metrics",
]
