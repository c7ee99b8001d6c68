"""Bounds the total output that a worker keeps for all its programs, by dropping the largest output.

A program may request any output limit, and its output is kept while it runs, for a client that reconnects.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["OutputBudget"]

MAX_BYTES = 2**29


class OutputBudget:
    """Counts the kept output of each program, and drops the largest output if the total is too large.

    Args:
        max_bytes: maximum bytes to keep.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[str, str], int] = {}
        self._drops: dict[tuple[str, str], Callable[[], None]] = {}
        self.total_bytes = 0

    def add(self, key: tuple[str, str], size: int, drop: Callable[[], None]) -> None:
        """Count a further piece of a program's output; drop the largest outputs while the total is too large.

        Args:
            key: names of the sandbox and the program.
            size: bytes of the piece.
            drop: function that discards all output of the program. It is called once, if the total is too large and the
                program's output is the largest.
        """
        self._kept[key] = self._kept.get(key, 0) + size
        self._drops[key] = drop
        self.total_bytes += size
        while self.total_bytes > self._max_bytes:
            largest = max(self._kept, key=self._kept.__getitem__)
            dropped = self._drops[largest]
            self.release(largest)
            dropped()

    def release(self, key: tuple[str, str]) -> None:
        """Stop counting the output of a program."""
        self.total_bytes -= self._kept.pop(key, 0)
        self._drops.pop(key, None)
