"""The audit log: one JSON object per line, without bodies, output or secrets."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path

__all__ = ["AuditLog"]

_MAX_BYTES = 2**26
_MAX_QUEUED_LINES = 100_000
"""Maximum number of lines that are queued while writing to the disk fails."""
_LINES_PER_WRITE = 1000
_MAX_TEXT_CHARS = 200
"""Maximum number of characters of one field, since clients choose the names in it."""
_log = logging.getLogger(__name__)


class AuditLog:
    """Appends lines to the file `path`, which is renamed to `path`.1 at 64 MiB. With `None`, nothing is logged.

    If the file was moved (logrotate), the next `flush` creates it again. If writing fails, lines stay queued.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._lock = threading.Lock()
        self.num_dropped = 0
        self.is_failing = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_file(path)

    def record(
        self, action: str, *, owner: str, token: str, target: str = "", outcome: str = "ok", peer: str = ""
    ) -> None:
        """Queue one line, which the next `flush` writes to the file; drop the line if too many lines are queued."""
        if self._path is None:
            return
        fields = {"action": action, "owner": owner, "token": token, "what": target, "outcome": outcome, "peer": peer}
        entry = {
            "time": round(time.time(), 3),
            **{name: text[:_MAX_TEXT_CHARS] for name, text in fields.items() if text},
        }
        if len(self._lines) >= _MAX_QUEUED_LINES:
            self.num_dropped += 1
        else:
            self._lines.append(json.dumps(entry).encode() + b"\n")

    def flush(self) -> None:
        """Write the queued lines to the audit log; may be called from any thread."""
        with self._lock:
            if self._path is None or not (self._rest or self._lines):
                return
            try:
                self._write(self._path)
                self.is_failing = False
            except OSError as error:
                if not self.is_failing:
                    _log.warning("cannot write the audit file '%s': %s", self._path, error.strerror)
                self.is_failing = True

    def _write(self, path: Path) -> None:
        if self._file is None or not _is_same_file(self._file, path):
            self._flush_and_close()
            self._file = _open_file(path)
        if os.fstat(self._file).st_size > _MAX_BYTES:
            path.replace(path.with_name(path.name + ".1"))
            self._flush_and_close()
            self._file = _open_file(path)
        while self._rest or self._lines:
            if not self._rest:
                self._rest = b"".join(self._lines.popleft() for _ in range(min(len(self._lines), _LINES_PER_WRITE)))
            # On a full disk, `write` may write only a part; the rest must be written before any other line.
            self._rest = self._rest[os.write(self._file, self._rest) :]

    def close(self) -> None:
        """Flush the log and close it."""
        self.flush()
        self._flush_and_close()
        self._path = None

    def _flush_and_close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_same_file(file: int, path: Path) -> bool:
    try:
        at_path, opened = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (at_path.st_ino, at_path.st_dev) == (opened.st_ino, opened.st_dev)
