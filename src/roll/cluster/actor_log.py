"""Logs of Ray actors in the run's directory, next to the controller's.

    descriptors 1 and 2, loggers and warnings of the actor ──► logs/<role>-<index>.log of the run

If the run's directory does not exist (on another machine without a shared file system), the output stays in Ray's log
files.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from roll.tracking.logs import redirect_infrastructure_logs

__all__ = ["ACTOR_LOG", "redirect_to_run_log"]

ACTOR_LOG = "ROLL_ACTOR_LOG"
"""Environment variable with the path of an actor's log."""

_open_log = ExitStack()
"""Keeps the log open until the process exits, because the last lines explain a failure."""


def redirect_to_run_log() -> None:
    """Redirect this process's output to the file named by `ACTOR_LOG`; do nothing if no writable file is set."""
    # On another machine without a shared file system the directory does not exist, and Ray's own files get the output.
    path = Path(os.environ.get(ACTOR_LOG, ""))
    if path.name and os.access(path.parent, os.W_OK):
        _open_log.enter_context(redirect_infrastructure_logs(path))
