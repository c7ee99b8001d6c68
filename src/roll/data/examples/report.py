"""What is to be known of the data before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.data.bad_rows import BadRows

__all__ = ["Report"]


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
        """Yield the lines of the report; none if there are no findings."""
        for domain, rows in self.bad.items():
            if rows.counts:
                yield from rows.lines(domain)
                yield "  They are left out."
        yield from self.notes
