"""The data ledger: every sampled prompt (draw) has an id and exactly one outcome.

    open ──► in flight ──► trained | filtered | failed | expired       (final: recorded once)

Invariants, checked on every call:
    - draw ids are consecutive: 0, 1, 2, …
    - an outcome can be recorded only for a draw in flight, so no draw is trained twice or skipped silently.

The ledger is part of every checkpoint, as one JSON line per draw.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from roll.errors import CheckpointError
from roll.protocols import Draw
from roll.types import DrawOutcome

__all__ = ["DataLedger", "LedgerEntry"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """The record of one draw."""

    draw_id: int
    uid: str
    outcome: DrawOutcome
    """Outcome of the draw."""
    step: int
    """Step at which the final outcome was recorded; before, the step at which the prompt was sampled."""
    why: str = ""
    """Reason why the draw was not trained; empty if it was trained."""


class DataLedger:
    """Records draws and their outcomes."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self._entries)

    def __getitem__(self, draw_id: int) -> LedgerEntry:
        return self._entries[draw_id]

    def record_draws(self, draws: Iterable[Draw], step: int) -> None:
        """Record draws that were sampled in step `step`; they are in flight until `record_outcome` is called."""
        for draw in draws:
            assert draw.draw_id == len(self._entries), f"draw {draw.draw_id} recorded after {len(self._entries)} draws"
            self._entries.append(
                LedgerEntry(draw_id=draw.draw_id, uid=draw.uid, outcome=DrawOutcome.IN_FLIGHT, step=step)
            )

    def record_outcome(self, draw_id: int, outcome: DrawOutcome, step: int, reason: str = "") -> None:
        """Record a draw's final outcome, and the step and the reason for this outcome."""
        entry = self._entries[draw_id]
        assert outcome is not DrawOutcome.IN_FLIGHT, "in_flight is not a final outcome"
        assert entry.outcome is DrawOutcome.IN_FLIGHT, f"draw {draw_id} is already {entry.outcome} (step {entry.step})"
        self._entries[draw_id] = LedgerEntry(draw_id=draw_id, uid=entry.uid, outcome=outcome, step=step, why=reason)

    def drop_from(self, draw_id: int) -> list[int]:
        """Remove this draw and all later draws, which must be in flight and are sampled again; return the removed
        ids.
        """
        dropped = self._entries[draw_id:]
        settled = [entry.draw_id for entry in dropped if entry.outcome is not DrawOutcome.IN_FLIGHT]
        assert not settled, f"draws {settled} have a final outcome and cannot be dropped"
        del self._entries[draw_id:]
        return [entry.draw_id for entry in dropped]

    def count_outcomes(self) -> dict[str, int]:
        """Return the number of draws by outcome, including outcomes without draws."""
        counts = Counter(entry.outcome.value for entry in self._entries)
        return {outcome.value: counts[outcome.value] for outcome in DrawOutcome}

    def list_in_flight(self) -> list[int]:
        """Return the ids of draws without a final outcome."""
        return [entry.draw_id for entry in self._entries if entry.outcome is DrawOutcome.IN_FLIGHT]

    def dumps(self, count: int | None = None) -> str:
        """Return the first `count` entries, by default all, as JSON lines."""
        entries = self._entries[:count]
        return "".join(json.dumps(asdict(entry), separators=(",", ":")) + "\n" for entry in entries)

    @classmethod
    def loads(cls, text: str) -> DataLedger:
        """Load a ledger from JSON lines that `dumps` returned.

        Raises:
            CheckpointError: A line is malformed, or the ids are not consecutive.
        """
        ledger = cls()
        for number, line in enumerate(text.splitlines()):
            try:
                fields = json.loads(line)
                outcome = fields.pop("fate") if "fate" in fields else fields["outcome"]  # former name
                entry = LedgerEntry(**(fields | {"outcome": DrawOutcome(outcome)}))
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(f"data ledger, line {number + 1} is malformed: {error}") from None
            if entry.draw_id != number:
                raise CheckpointError(
                    f"data ledger, line {number + 1}: the draw id must be {number}, got {entry.draw_id}"
                )
            ledger._entries.append(entry)
        return ledger
