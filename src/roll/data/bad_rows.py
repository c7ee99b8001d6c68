"""Which rows of a source cannot be used, and why: counted by reason, the first of each with its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from roll.data.cells import BadRow
from roll.errors import DataError

__all__ = ["BadRows"]

NUM_REASONS = 20
"""Reasons that are shown, the most frequent ones."""
NUM_SHOWN = 3
"""Rows that are shown of each reason."""


class BadRows:
    """What is wrong with the rows of one source: how many for each reason, and the first of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, list[str]] = {}
        self.num_rows = 0
        """Of the source, good and bad."""

    def add(self, reason: str, message: str) -> None:
        """Take in one row."""
        self.counts[reason] += 1
        shown = self.first.setdefault(reason, [])
        if len(shown) < NUM_SHOWN:
            shown.append(message)

    def refuse(self, error: DataError) -> None:
        """Take in one row by its error."""
        self.add(error.reason if isinstance(error, BadRow) else "unreadable", str(error))

    def lines(self, domain: str, use: str = "learnt from") -> Iterator[str]:
        """Yield one line for each reason and for each row that is shown.

        Args:
            domain: the source's name.
            use: what the rows cannot be.
        """
        yield f"{self.counts.total():,} of {self.num_rows:,} rows of data source '{domain}' cannot be {use}:"
        for reason, count in self.counts.most_common(NUM_REASONS):
            yield f"  {count:,} × {reason}"
            yield from (f"    {message}" for message in self.first[reason])
        if len(self.counts) > NUM_REASONS:
            yield f"  and {len(self.counts) - NUM_REASONS:,} further reasons"
