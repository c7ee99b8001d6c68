"""Trackers in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, SwanLab, MLflow, Trackio.

    metrics, tables ──► GuardedSink (a queue, a thread) ──► Sink (one module per tracker, with its client)

Invariants:
    - a tracker can neither block nor end a run;
    - a tracker receives the content of `metrics.jsonl`, without values that are `null` there;
    - a resumed run continues the same run of the tracker, even on a different machine.
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
