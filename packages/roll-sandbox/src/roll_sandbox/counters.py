"""Reads the kernel's counts of OOM kills and refused forks in a sandbox."""

from __future__ import annotations

import os
from collections.abc import Sequence

from roll_sandbox.types import Limit

__all__ = ["Counters"]


class Counters:
    """Reads counters of a control group, and remembers their last values.

    Args:
        files: the files that count OOM kills and refused forks, each with the word that precedes the count.
    """

    def __init__(self, files: Sequence[tuple[str, str]] = ()) -> None:
        self._files = list(zip((Limit.MEMORY, Limit.PROCESSES), files, strict=False))
        self._seen = {limit: _read_count(*file) for limit, file in self._files}

    def poll(self) -> set[Limit]:
        """Return the limits (memory, processes) whose counter has grown since the last call."""
        grown = set()
        for limit, file in self._files:
            count = _read_count(*file)
            if count > self._seen[limit]:
                grown.add(limit)
            self._seen[limit] = count
        return grown


def _read_count(path: str, word: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return 0  # the group was removed, with its sandbox
    try:
        text = os.read(descriptor, 4096).decode()
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    for line in text.split("\n"):
        name, _, value = line.partition(" ")
        if name == word:
            return int(value)
    return 0
