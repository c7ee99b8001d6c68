"""What the check of the examples before training found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.data.bad_rows import BadRows

__all__ = ["Report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the check of the examples before training found."""

    bad: Mapping[str, BadRows]
    """Bad rows by domain, which are skipped."""
    longest: int | None
    """Tokens of the longest sample; `None` if there are too many to render them all."""
    num_tokens: float
    """Average number of tokens per example that the loss counts."""
    num_cut: int
    """Number of rendered examples whose answers are too long and are truncated."""
    num_rewritten: int
    """Number of rendered conversations with answers that are not trained on: see `roll.data.turns`."""
    notes: tuple[str, ...] = ()
    """Further notes for the user."""

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of the report; none if there are no findings."""
        for domain, rows in self.bad.items():
            if rows.counts:
                yield from rows.format_lines(domain)
                yield "  They are skipped."
        yield from self.notes
