"""The setup of every process of a vLLM engine: output goes to the log file, and the process ends with its parent.

vLLM's logging is configured to write to `LOG_STREAM` (`VLLM_LOGGING_STREAM=ext://…`), so this module is imported with
vLLM's logger, before any model loads. The process that owns the engine only uses the stream.

A process that was started before its engine was known (`prefork`) runs this setup when it receives its work.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import connection, spawn
from pathlib import Path

__all__ = [
    "LAUNCH_VARIABLE",
    "LOG_STREAM",
    "LOG_VARIABLE",
    "OWNER_VARIABLE",
    "LogStream",
    "set_up_process",
    "wait_for_work",
]

OWNER_VARIABLE = "ROLL_ENGINE_OWNER"
"""Environment variable with the process id of the engine's owner."""
LAUNCH_VARIABLE = "ROLL_ENGINE_LAUNCH"
"""Environment variable that identifies the processes of one launch."""
LOG_VARIABLE = "ROLL_ENGINE_LOG"
"""Environment variable with the path of the engine's log file."""

PARENT_POLL_S = 1.0
_PRELOADED_MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "roll.inference.vllm.worker")
_work_received = threading.Event()
"""Set when a waiting process has received its work."""


class LogStream(io.TextIOBase):
    """A text stream that appends to a file; `redirect` changes the file while the stream is in use."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def writable(self) -> bool:
        """Return true: text can be written to this stream."""
        return True

    def write(self, text: str) -> int:
        """Append the text with a single system call, so that lines of several processes are not interleaved."""
        os.write(self._descriptor, text.encode(errors="backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def redirect(self, path: str | Path) -> None:
        """Append all later text to the file `path` instead."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, self._descriptor)
        os.close(descriptor)


def _end_with_parent() -> None:
    """Kill this process when its parent ends, even if the parent was killed by SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent_id = parent.pid

    def wait() -> None:
        # The sentinel is a pipe that closes when the parent ends. PR_SET_PDEATHSIG is not portable, and would kill this
        # process when the *thread* that started the engine ends. If another process still holds the pipe open, the
        # change of the parent's ID shows that the parent has ended.
        while not connection.wait([parent.sentinel], timeout=PARENT_POLL_S) and os.getppid() == parent_id:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _end_with_owner() -> None:
    """Wait until this process has received work; kill this process if its parent ends before that.

    The parent's ID is polled, because imports take seconds and another process may keep the sentinel pipe open.
    """
    owner = int(os.environ[OWNER_VARIABLE])
    while not _work_received.wait(PARENT_POLL_S):
        if os.getppid() != owner:
            os.kill(os.getpid(), signal.SIGKILL)


def _redirect_output() -> None:
    """Redirect the output of this process to the log file, including the output of C libraries."""
    if LOG_VARIABLE in os.environ:
        os.dup2(LOG_STREAM.fileno(), 1)
        os.dup2(LOG_STREAM.fileno(), 2)


def wait_for_work(*, tracker_fd: int, pipe_handle: int) -> None:
    """Import the modules that an engine needs, then run the work that the parent process sends, like a spawned process.

    Args:
        tracker_fd: The file descriptor of the parent's resource tracker.
        pipe_handle: The pipe from which work is read. If it is closed without work, this process ends.
    """
    threading.Thread(target=_end_with_owner, name="end-with-owner", daemon=True).start()
    _set_process_title("roll::waiting for an engine")  # setproctitle must be called before the environment changes
    for name in _PRELOADED_MODULES:
        import_module(name)
    spawn.spawn_main(tracker_fd=tracker_fd, pipe_handle=pipe_handle)


def _set_process_title(name: str) -> None:
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(name)


def set_up_process(environment: Mapping[str, str]) -> None:
    """Set up this process as if its parent had spawned it with this environment.

    Variables that already have the correct value are not set again: some names, such as the empty name, can be
    inherited but not set.
    """
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment.items() - os.environ.items())
    if LOG_VARIABLE in os.environ:
        LOG_STREAM.redirect(os.environ[LOG_VARIABLE])
    _redirect_output()
    _end_with_parent()
    _work_received.set()


LOG_STREAM = LogStream(os.environ.get(LOG_VARIABLE, os.devnull))

if os.environ.get(OWNER_VARIABLE, str(os.getpid())) != str(os.getpid()):
    _end_with_parent()
    # The child leaves the terminal's process group: on Ctrl-C, the owner saves first and then ends its engines.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _redirect_output()
