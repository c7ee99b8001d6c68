"""What a Ray actor prints goes into its own log in the run's directory, beside the controller's.

    descriptors 1 and 2, loggers and warnings of the actor ──► logs/<role>-<index>.log of the run

Where the run's directory does not exist (another machine without a shared file system) Ray's own files keep it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from roll.tracking.logs import redirect_infrastructure_logs

__all__ = ["ACTOR_LOG", "log_into_the_run"]

ACTOR_LOG = "ROLL_ACTOR_LOG"
"""Variable with the path of an actor's log."""

_open = ExitStack()
"""Held until the process ends: what is printed last matters most."""


def log_into_the_run() -> None:
    """Send the rest of this process's output to its actor's log, if one is set and can be written."""
    path = Path(os.environ.get(ACTOR_LOG, ""))
    if path.name and os.access(path.parent, os.W_OK):
        _open.enter_context(redirect_infrastructure_logs(path))
