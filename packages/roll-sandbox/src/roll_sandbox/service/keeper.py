"""Periodic housekeeping: ends lifetimes, stops orphaned sandboxes, and removes workers that stay away."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Row

from roll_sandbox.errors import SandboxDatabaseError, SandboxLostError, SandboxRequestError
from roll_sandbox.service.entries import Entry, Program
from roll_sandbox.service.links import WorkerLink
from roll_sandbox.service.records import readable
from roll_sandbox.service.switchboard import AWAY_S, ORPHAN_S, Switchboard
from roll_sandbox.wire import beat_s, failure_said, spec_of

__all__ = ["Keeper", "restore"]

_EVERY_S = 0.5
_REPORT_EVERY = _QUOTAS_EVERY = 4
_FORGET_EVERY = 120
_SILENT_BEATS = 5
_log = logging.getLogger(__name__)


class Keeper:
    """The housekeeping of a switchboard.

    Args:
        board: the switchboard.
        orphan_s: see `switchboard.ORPHAN_S`.
        away_s: see `switchboard.AWAY_S`.
        report: updates the report of the worker in this process, if there is one.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        orphan_s: float = ORPHAN_S,
        away_s: float = AWAY_S,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._orphan_s = orphan_s
        self.away_s = away_s
        self._report = report
        self._looked = math.inf

    async def recover(self, local: str) -> None:
        """Restore the sandboxes of an earlier server. Its local sandboxes are lost; those of joined workers may come
        back.
        """
        rows = await asyncio.to_thread(self._board.records.alive)
        programs = await asyncio.to_thread(self._board.records.programs)
        for row in rows:
            try:
                if row.worker != local:
                    restore(self._board, row, programs.get((row.owner, row.name), {}))
                    continue
            except (SandboxRequestError, TypeError) as error:
                _log.warning("what is written of sandbox '%s' cannot be read, so it is lost: %s", row.name, error)
            self._board.records.gone(row.owner, row.name, "ended", "lost", None)

    async def watch(self) -> None:
        """Run the housekeeping until canceled."""
        turns = 0
        while True:
            await asyncio.sleep(_EVERY_S)
            turns += 1
            self.look(time.monotonic())
            try:
                await self._now_and_then(turns)
            except SandboxDatabaseError:  # tried again in the next round
                continue
            except Exception:  # otherwise no lifetime would end any more
                _log.exception("the sandbox service's housekeeping failed, and is tried again")

    async def _now_and_then(self, turns: int) -> None:
        await asyncio.to_thread(self._board.audit.flush)
        if turns % _REPORT_EVERY == 1:
            self._report()
        if turns % _QUOTAS_EVERY == 0:
            self._board.quotas.name(await asyncio.to_thread(self._board.records.quotas))
        if turns % _FORGET_EVERY == 0:
            await asyncio.to_thread(self._board.records.forget)

    def look(self, monotonic: float) -> None:
        """Run one round of the housekeeping."""
        board = self._board
        stalled, self._looked = monotonic - self._looked > 4 * _EVERY_S, monotonic  # received beats may be unread
        for entry in list(board.entries.values()):
            if entry.stopping:
                continue
            if entry.ends <= monotonic:
                board.stop(entry, expired=True)
            elif entry.leased and entry.alone_since is not None and monotonic - entry.alone_since > self._orphan_s:
                board.counts["orphans"] += 1
                board.stop(entry)
        for worker in list(board.workers.values()):
            if not stalled and worker.here and monotonic - worker.heard > _SILENT_BEATS * beat_s(self.away_s):
                worker.away(monotonic)
            elif not worker.here and monotonic - worker.away_since > self.away_s:
                give_up(board, worker)


def restore(board: Switchboard, row: Row[Any], programs: dict[str, str]) -> None:
    """Restore a sandbox of an earlier server, with the states of its programs; its worker may come back.

    Raises:
        SandboxRequestError, TypeError: the row is corrupt.
    """
    spec, created = spec_of(readable(row.spec)), row.created + 0.0
    left = min(row.expires - time.time(), row.expires - created)  # a clock that was set back must not add time
    ends = time.monotonic() + left
    away = WorkerLink(row.worker, None, away_since=time.monotonic())
    worker = board.workers.setdefault(row.worker, away)
    state, leased = row.state, bool(row.leased)
    entry = Entry(row.owner, row.name, spec, worker, created, ends, state=state, leased=leased)
    entry.alone_since = time.monotonic()
    for program, state in programs.items():
        entry.programs[program] = Program(None, True, over=state != "running")
    board.quotas.count_in(entry.owner, entry.running)
    board.quotas.take(entry.owner, spec)
    board.add(entry)


def give_up(board: Switchboard, worker: WorkerLink) -> None:
    """Remove a worker that does not come back; its sandboxes are lost."""
    del board.workers[worker.name]
    for entry in held(board, worker):
        lose(board, entry, f"its worker '{worker.name}' has gone")


def lose(board: Switchboard, entry: Entry, why: str) -> None:
    """Mark a sandbox as lost: it is gone, and the results of its programs are unknown."""
    said: dict[str, Any] = {"op": "gone", "sandbox": entry.place}
    board.hear({**said, **failure_said(SandboxLostError(f"the sandbox is lost: {why}"))})


def held(board: Switchboard, worker: WorkerLink) -> list[Entry]:
    """Return the sandboxes of one worker."""
    return [entry for entry in board.entries.values() if entry.worker is worker]
