"""The start of every process of an engine: it redirects its output to the log file, and makes the process end with its
parent.

vLLM's logging names `LOG_STREAM` as its stream (`VLLM_LOGGING_STREAM=ext://…`), so this module is imported when vLLM's
logger is, before any model loads. In the process that owns the engine, only the stream is used.

A process that was started before its engine was known (`ahead`) does the same when it receives its work: `begin`.

A child leaves the terminal's process group: Ctrl-C is for the owner, which saves first and ends its engines itself.

A child ends when its parent does, even if the parent was killed by SIGKILL: Python keeps a pipe from parent to child,
which closes when the parent ends. (PR_SET_PDEATHSIG is not portable, and would fire when the *thread* that started the
engine ends.) If another process still holds that pipe, the change of the parent's id is detected instead.
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

__all__ = ["LAUNCH", "LOG", "LOG_STREAM", "OWNER", "LogStream", "begin", "wait_for_work"]

OWNER = "ROLL_ENGINE_OWNER"
"""Environment variable with the process id of the engine's owner."""
LAUNCH = "ROLL_ENGINE_LAUNCH"
"""Environment variable that identifies the processes of one launch."""
LOG = "ROLL_ENGINE_LOG"
"""Environment variable with the path of the engine's log file."""

PARENT_POLL_S = 1.0
_IMPORTED_AHEAD = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "roll.inference.vllm.worker")
_begun = threading.Event()
"""Set when a waiting process has received its work."""


class LogStream(io.TextIOBase):
    """A text stream that appends to a file, which may be changed while it is in use."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def writable(self) -> bool:
        """Return true."""
        return True

    def write(self, text: str) -> int:
        """Append the whole text in one call, so that lines of several processes do not mix."""
        os.write(self._descriptor, text.encode(errors="backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        """Return the file descriptor."""
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


def _end_with_owner() -> None:
    """Kill this process if its owner ends while it still waits for work.

    The owner's id is polled, because imports take seconds and another process may hold the pipe that signals the end.
    """
    owner = int(os.environ[OWNER])
    while not _begun.wait(PARENT_POLL_S):
        if os.getppid() != owner:
            os.kill(os.getpid(), signal.SIGKILL)


def _take_over_streams() -> None:
    if LOG in os.environ:
        os.dup2(LOG_STREAM.fileno(), 1)
        os.dup2(LOG_STREAM.fileno(), 2)


def wait_for_work(*, tracker_fd: int, pipe_handle: int) -> None:
    """Import the modules that an engine needs, then run the work that the owner sends, as a spawned process does.

    Args:
        tracker_fd: The owner's resource tracker.
        pipe_handle: The pipe of the work. If it is closed without any, this process ends.
    """
    threading.Thread(target=_end_with_owner, name="end-with-owner", daemon=True).start()
    _name_this_process("roll::waiting for an engine")  # setproctitle must be called before the environment changes
    for name in _IMPORTED_AHEAD:
        import_module(name)
    spawn.spawn_main(tracker_fd=tracker_fd, pipe_handle=pipe_handle)


def _name_this_process(name: str) -> None:
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(name)


def begin(environment: Mapping[str, str]) -> None:
    """Take on the environment and streams of a process that its owner started with this environment.

    Variables that are already set stay: some names can be inherited but not set, such as the empty one.
    """
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment.items() - os.environ.items())
    if LOG in os.environ:
        LOG_STREAM.redirect(os.environ[LOG])
    _take_over_streams()
    _end_with_parent()
    _begun.set()


LOG_STREAM = LogStream(os.environ.get(LOG, os.devnull))

if os.environ.get(OWNER, str(os.getpid())) != str(os.getpid()):
    _end_with_parent()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _take_over_streams()
