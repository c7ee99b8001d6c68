"""One writer per run directory.

The lock is the kernel's (`flock`), so it ends with the process however that dies. A forked child drops its
copy at once: a worker that outlives a killed controller must not keep the run locked.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from roll.errors import RunDirectoryError

__all__ = ["RunLock"]

logger = logging.getLogger(__name__)


class RunLock:
    """Holds `path` locked from construction to `release` (or the death of this process).

    Raises:
        RunDirectoryError: another process holds it; names the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._close()
                raise RunDirectoryError(
                    f"run directory '{path.parent}' is being written by process {holder}: "
                    "wait until it has ended, stop it, or choose another name for this run."
                ) from None
            logger.warning(
                "run directory '%s' cannot be locked here (%s): start no second process on it",
                path.parent,
                error,
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let others write the run; may be called twice."""
        _held.discard(self)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
