"""A bound on the output that a worker keeps of all its programs together: the largest output is dropped first.

A program may request any output limit, and its output is kept while it runs, for a client that reconnects.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Outputs"]

MAX_BYTES = 2**29


class Outputs:
    """The kept output of a worker; see the module.

    Args:
        max_bytes: most bytes to keep.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[str, str], int] = {}
        self._drops: dict[tuple[str, str], Callable[[], None]] = {}
        self.total_bytes = 0

    def add(self, key: tuple[str, str], size: int, drop: Callable[[], None]) -> None:
        """Count another piece of a program's output.

        Args:
            key: names of the sandbox and the program.
            size: bytes of the piece.
            drop: drops all output of the program; called once, if it is the largest and the total is too large.
        """
        self._kept[key] = self._kept.get(key, 0) + size
        self._drops[key] = drop
        self.total_bytes += size
        while self.total_bytes > self._max_bytes:
            largest = max(self._kept, key=self._kept.__getitem__)
            dropped = self._drops[largest]
            self.forget(largest)
            dropped()

    def forget(self, key: tuple[str, str]) -> None:
        """Stop counting a program's output."""
        self.total_bytes -= self._kept.pop(key, 0)
        self._drops.pop(key, None)
