"""Trackers in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, SwanLab, MLflow, Trackio.

    metrics, tables ──► GuardedSink (a queue, a thread) ──► Sink (one file per tracker, with its own client)

Invariants:
    - a run never waits for a tracker, and never ends because of one;
    - a tracker receives the content of `metrics.jsonl`, without values that are `null` there;
    - a resumed run continues the tracker's own run, on whichever machine it is resumed.
"""

from roll.tracking.sinks.base import RolloutTable, Sink, SinkArguments
from roll.tracking.sinks.guarded import GuardedSink, has_detached_threads
from roll.tracking.sinks.registry import SINKS, check_packages, open_sinks
from roll.tracking.sinks.tables import build_rollout_table

__all__ = [
    "SINKS",
    "GuardedSink",
    "RolloutTable",
    "Sink",
    "SinkArguments",
    "build_rollout_table",
    "check_packages",
    "has_detached_threads",
    "open_sinks",
]
