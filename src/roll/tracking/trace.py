"""A trace file for Perfetto (ui.perfetto.dev) and chrome://tracing, valid JSON after every write.

The file is one JSON array, one event per line. An append overwrites the closing `]` with the new events and a new `]`
in a single `write`, so a process that is killed between appends leaves a complete file; a file that was truncated by a
full disk is repaired when it is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["TraceFile"]

_ARRAY_END = b"\n]\n"


class TraceFile:
    """Appends trace events to the file `path`; a resumed run continues its existing file.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        whole = os.pread(self._descriptor, len(_ARRAY_END), max(0, size - len(_ARRAY_END))) == _ARRAY_END
        self._end = size - len(_ARRAY_END) if whole else _find_end_of_events(os.pread(self._descriptor, size, 0))

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Append events to the trace file; do nothing if there are no events, or after `close`."""
        if self._descriptor is None or not events:
            return
        lines = b",\n".join(json.dumps(event, separators=(",", ":")).encode() for event in events)
        text = (b",\n" if self._end else b"[\n") + lines
        # One `write`: a process that is killed leaves either the old array or the complete new one.
        os.pwrite(self._descriptor, text + _ARRAY_END, self._end)
        self._end += len(text)
        os.ftruncate(self._descriptor, self._end + len(_ARRAY_END))

    def close(self) -> None:
        """Close the trace file. Calling it twice is safe."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _find_end_of_events(content: bytes) -> int:
    """Return the offset after the last complete event of a trace file; 0 if there is no event."""
    end = len(content)
    while end > 0:
        start = content.rfind(b"\n", 0, end) + 1
        line = content[start:end].rstrip(b",")
        with contextlib.suppress(ValueError):
            if isinstance(json.loads(line), dict):
                return start + len(line)
        end = start - 1
    return 0
