"""What is wrong with which rows, counted by reason, and what else is to be known of the data before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["BadRows", "Report"]

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

    def lines(self, domain: str) -> Iterator[str]:
        """All of it, one line for each reason and each row that is shown."""
        yield f"{self.counts.total():,} of {self.num_rows:,} rows of data source '{domain}' cannot be learnt from:"
        for reason, count in self.counts.most_common():
            yield f"  {count:,} × {reason}"
            yield from (f"    {message}" for message in self.first[reason])


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was found in the data before training."""

    bad: Mapping[str, BadRows]
    """By domain; these rows are left out."""
    longest: int | None
    """Tokens of the longest sample; `None` where there are too many to render them all."""
    num_tokens: float
    """Tokens of an example that the loss counts, on average."""
    num_cut: int
    """Examples, of those that were rendered, whose answers are too long and lose their ends."""
    num_rewritten: int
    """Conversations, of those that were rendered, with answers that are not learnt: see `roll.data.turns`."""
    notes: tuple[str, ...] = ()
    """What else a user should know."""

    def lines(self) -> Iterator[str]:
        """What to tell the user; nothing where all is well."""
        for domain, rows in self.bad.items():
            if rows.counts:
                yield from rows.lines(domain)
                yield "  They are left out."
        yield from self.notes
