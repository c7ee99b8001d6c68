"""Who did what: one JSON object a line, without bodies, output or secrets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO

__all__ = ["Audit"]

_MOST_BYTES = 2**26


class Audit:
    """Appends to `path`; at 64 MiB the file becomes `path`.1, in place of an earlier one. `None`: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._bytes = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open(path)

    def _open(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        path.chmod(0o600)
        self._bytes = path.stat().st_size

    def note(self, action: str, *, owner: str, token: str, what: str = "", outcome: str = "ok", peer: str = "") -> None:
        """One line; it is on disk after the next `flush`."""
        if self._file is None or self._path is None:
            return
        entry = {
            "time": round(time.time(), 3),
            "action": action,
            "owner": owner,
            "token": token,
            "what": what,
            "outcome": outcome,
            "peer": peer,
        }
        self._bytes += self._file.write(json.dumps({name: value for name, value in entry.items() if value}) + "\n")
        if self._bytes > _MOST_BYTES:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open(self._path)

    def flush(self) -> None:
        """Bring it to the disk."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """No more."""
        if self._file is not None:
            self._file.close()
            self._file = None
