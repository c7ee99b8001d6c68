"""What every process of an engine does first: send its messages to the log file, and die with its parent.

vLLM's logging names `LOG_STREAM` as its stream (`VLLM_LOGGING_STREAM=ext://…`), so this module is imported when vLLM's
logger is, before any model loads. In the process that owns the engine, only the stream is used.

A child leaves the terminal's process group: Ctrl-C is for the owner, which saves first and ends its engines itself.

A child ends when its parent does, even if the parent was SIGKILLed: Python keeps a pipe from parent to child whose
closing tells of the parent's end (the portable counterpart of PR_SET_PDEATHSIG, which would fire when the *thread* that
started the engine ends). Where some other process still holds that pipe, the change of the parent's id tells instead.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection
from pathlib import Path

__all__ = ["LAUNCH", "LOG", "LOG_STREAM", "OWNER", "LogStream"]

OWNER = "ROLL_ENGINE_OWNER"
"""Variable with the process id of the engine's owner."""
LAUNCH = "ROLL_ENGINE_LAUNCH"
"""Variable that tells the processes of one launch from those of another."""
LOG = "ROLL_ENGINE_LOG"
"""Variable with the path of the engine's log file."""

PARENT_POLL_S = 1.0


class LogStream(io.TextIOBase):
    """A text stream that appends to a file, which may be changed while it is in use."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Append, whole, so that lines of several processes do not mix."""
        os.write(self._descriptor, text.encode(errors="backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._descriptor

    def redirect(self, path: str | Path) -> None:
        """Append to another file from now on."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, self._descriptor)
        os.close(descriptor)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent_id = parent.pid

    def wait() -> None:
        while not connection.wait([parent.sentinel], timeout=PARENT_POLL_S) and os.getppid() == parent_id:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


LOG_STREAM = LogStream(os.environ.get(LOG, os.devnull))

if os.environ.get(OWNER, str(os.getpid())) != str(os.getpid()):
    _end_with_parent()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    if LOG in os.environ:
        os.dup2(LOG_STREAM.fileno(), 1)
        os.dup2(LOG_STREAM.fileno(), 2)
