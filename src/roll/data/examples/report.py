"""The report of the check of examples before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.data.bad_rows import BadRowCollector

__all__ = ["ExampleReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleReport:
    """The results of checking the examples before training."""

    bad: Mapping[str, BadRowCollector]
    """Bad rows by domain, which are skipped."""
    longest: int | None
    """Number of tokens of the longest sample; `None` if there are too many samples to render them all."""
    num_tokens: float
    """Average number of loss tokens per example."""
    num_truncated: int
    """Number of rendered examples whose answers are too long and are truncated."""
    num_rewritten: int
    """Number of rendered conversations with answers that are not trained on: see `roll.data.turns`."""
    notes: tuple[str, ...] = ()
    """Further notes for the user."""

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of the report, which is empty without findings."""
        for domain, rows in self.bad.items():
            if rows.counts:
                yield from rows.format_lines(domain)
                yield "  They are skipped."
        yield from self.notes
