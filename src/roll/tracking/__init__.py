"""Record a run in its run directory and in trackers, and display it.

Submodules are imported on first access, and torch, rich, pyarrow, matplotlib and tensorboard on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.tracking.metrics_file import read_metrics, read_untrusted_metrics
    from roll.tracking.run_directory import RunDirectory
    from roll.tracking.spans import Spans
    from roll.tracking.summary import Summary
    from roll.tracking.tracker import Tracker

__all__ = [
    "RunDirectory",
    "Spans",
    "Summary",
    "Tracker",
    "read_metrics",
    "read_untrusted_metrics",
]

_MODULES = {
    "RunDirectory": "run_directory",
    "Spans": "spans",
    "Summary": "summary",
    "Tracker": "tracker",
    "read_untrusted_metrics": "metrics_file",
    "read_metrics": "metrics_file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
