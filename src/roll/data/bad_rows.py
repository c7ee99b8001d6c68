"""Reports on a source's unusable rows: counts by reason, and the messages of the first rows with each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from roll.data.cells import BadRow
from roll.errors import DataError

__all__ = ["BadRowCollector"]

MAX_REASONS = 20
"""Maximum number of reasons in a report; the most frequent ones are shown."""
MAX_MESSAGES_PER_REASON = 3
"""Maximum number of rows in a report for each reason."""


class BadRowCollector:
    """Collects the unusable rows of one source: their number by reason, and the messages of the first rows."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, list[str]] = {}
        self.num_rows = 0
        """Number of rows of the source, including the unusable ones."""

    def add(self, reason: str, message: str) -> None:
        """Record that a row is unusable; only the first `MAX_MESSAGES_PER_REASON` messages for each reason are kept."""
        self.counts[reason] += 1
        shown = self.first.setdefault(reason, [])
        if len(shown) < MAX_MESSAGES_PER_REASON:
            shown.append(message)

    def add_error(self, error: DataError) -> None:
        """Record that a row is unusable, with the reason and the message of its error."""
        self.add(error.reason if isinstance(error, BadRow) else "unreadable", str(error))

    def format_lines(self, domain: str, use: str = "used for training") -> Iterator[str]:
        """Yield the lines of a report: the number of unusable rows, then the reasons, each with its first messages.

        Args:
            domain: The source's name.
            use: Phrase after "cannot be" in the first line, such as "used for training".
        """
        yield f"{self.counts.total():,} of {self.num_rows:,} rows of data source '{domain}' cannot be {use}:"
        for reason, count in self.counts.most_common(MAX_REASONS):
            yield f"  {count:,} × {reason}"
            shown = self.first[reason][: 1 if count == self.num_rows else None]  # the cause is the same for all rows
            yield from (f"    {message}" for message in shown)
        if len(self.counts) > MAX_REASONS:
            yield f"  and {len(self.counts) - MAX_REASONS:,} further reasons"
