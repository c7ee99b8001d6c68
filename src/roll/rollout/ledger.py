"""The data ledger: every prompt draw has an id and one fate.

    open ──► in flight ──► trained | filtered | failed | expired       (final: a fate is settled once)

Invariants, checked on every call:
    - draw ids are opened in order, without gaps: 0, 1, 2, …
    - a draw that is not in flight cannot be settled, so no draw is trained twice or skipped silently.

The ledger is part of every checkpoint, as one JSON line per draw.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from roll.errors import CheckpointError
from roll.protocols import Draw
from roll.types import Fate

__all__ = ["DataLedger", "LedgerEntry"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """The record of one draw."""

    draw_id: int
    uid: str
    fate: Fate
    step: int
    """Step at which the draw was made or, if it is settled, settled."""
    why: str = ""
    """Why the draw was not trained."""


class DataLedger:
    """Records draws and their fates."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self._entries)

    def __getitem__(self, draw_id: int) -> LedgerEntry:
        return self._entries[draw_id]

    def open(self, draws: Iterable[Draw], step: int) -> None:
        """Record fresh draws as in flight."""
        for draw in draws:
            assert draw.draw_id == len(self._entries), f"draw {draw.draw_id} opened after {len(self._entries)} draws"
            self._entries.append(LedgerEntry(draw_id=draw.draw_id, uid=draw.uid, fate=Fate.IN_FLIGHT, step=step))

    def settle(self, draw_id: int, fate: Fate, step: int, why: str = "") -> None:
        """Give a draw its final fate."""
        entry = self._entries[draw_id]
        assert fate is not Fate.IN_FLIGHT, "in_flight is not a final fate"
        assert entry.fate is Fate.IN_FLIGHT, f"draw {draw_id} is already {entry.fate} (step {entry.step})"
        self._entries[draw_id] = LedgerEntry(draw_id=draw_id, uid=entry.uid, fate=fate, step=step, why=why)

    def forget_from(self, draw_id: int) -> list[int]:
        """Drop this draw and all newer ones, which have no fate yet and will be drawn again; return their ids."""
        forgotten = self._entries[draw_id:]
        settled = [entry.draw_id for entry in forgotten if entry.fate is not Fate.IN_FLIGHT]
        assert not settled, f"draws {settled} have a fate and cannot be forgotten"
        del self._entries[draw_id:]
        return [entry.draw_id for entry in forgotten]

    def counts(self) -> dict[str, int]:
        """Return the number of draws by fate; every fate is present."""
        found = Counter(entry.fate.value for entry in self._entries)
        return {fate.value: found[fate.value] for fate in Fate}

    def in_flight(self) -> list[int]:
        """Return the ids of draws without a final fate."""
        return [entry.draw_id for entry in self._entries if entry.fate is Fate.IN_FLIGHT]

    def dumps(self, count: int | None = None) -> str:
        """Return the first `count` entries, or all, as JSON lines."""
        entries = self._entries[:count]
        return "".join(json.dumps(asdict(entry), separators=(",", ":")) + "\n" for entry in entries)

    @classmethod
    def loads(cls, text: str) -> DataLedger:
        """Load a ledger from the text that `dumps` returned.

        Raises:
            CheckpointError: A line is malformed, or ids have a gap.
        """
        ledger = cls()
        for number, line in enumerate(text.splitlines()):
            try:
                fields = json.loads(line)
                entry = LedgerEntry(**(fields | {"fate": Fate(fields["fate"])}))
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(f"data ledger, line {number + 1} is malformed: {error}") from None
            if entry.draw_id != number:
                raise CheckpointError(f"data ledger, line {number + 1}: draw {entry.draw_id} where {number} was due")
            ledger._entries.append(entry)
        return ledger
