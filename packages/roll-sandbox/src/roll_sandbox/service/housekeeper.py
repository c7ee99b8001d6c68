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
from roll_sandbox.service.dispatcher import AWAY_S, ORPHAN_S, Dispatcher
from roll_sandbox.service.entries import Entry, Program
from roll_sandbox.service.records import parse_row_json
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.wire import error_to_json, heartbeat_s, spec_from_json

__all__ = ["Housekeeper", "restore"]

_EVERY_S = 0.5
_REPORT_EVERY = _QUOTAS_EVERY = 4
_FORGET_EVERY = 120
_MAX_MISSED_HEARTBEATS = 5
_log = logging.getLogger(__name__)


class Housekeeper:
    """The housekeeping of a switchboard.

    Args:
        dispatcher: the switchboard.
        orphan_s: see `switchboard.ORPHAN_S`.
        away_s: see `switchboard.AWAY_S`.
        report: updates the report of the worker in this process, if there is one.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        orphan_s: float = ORPHAN_S,
        away_s: float = AWAY_S,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._orphan_s = orphan_s
        self.away_s = away_s
        self._report = report
        self._last_round = math.inf

    async def recover(self, local: str) -> None:
        """Restore the sandboxes of an earlier server. Its local sandboxes are lost; those of joined workers may come
        back.
        """
        rows = await asyncio.to_thread(self._dispatcher.records.load_live_sandboxes)
        programs = await asyncio.to_thread(self._dispatcher.records.load_live_programs)
        for row in rows:
            try:
                if row.worker != local:
                    restore(self._dispatcher, row, programs.get((row.owner, row.name), {}))
                    continue
            except (SandboxRequestError, TypeError) as error:
                _log.warning("the database row of sandbox '%s' is corrupt, so the sandbox is lost: %s", row.name, error)
            self._dispatcher.records.record_sandbox_end(row.owner, row.name, "ended", "lost", None)

    async def run(self) -> None:
        """Run the housekeeping until canceled."""
        turns = 0
        while True:
            await asyncio.sleep(_EVERY_S)
            turns += 1
            self.run_round(time.monotonic())
            try:
                await self._run_periodic_tasks(turns)
            except SandboxDatabaseError:  # tried again in the next round
                continue
            except Exception:  # otherwise no lifetime would end any more
                _log.exception("the sandbox service's housekeeping failed and will be retried")

    async def _run_periodic_tasks(self, turns: int) -> None:
        await asyncio.to_thread(self._dispatcher.audit.flush)
        if turns % _REPORT_EVERY == 1:
            self._report()
        if turns % _QUOTAS_EVERY == 0:
            self._dispatcher.quotas.set_named(await asyncio.to_thread(self._dispatcher.records.load_quotas))
        if turns % _FORGET_EVERY == 0:
            await asyncio.to_thread(self._dispatcher.records.delete_old)

    def run_round(self, monotonic: float) -> None:
        """Run one round of the housekeeping."""
        board = self._dispatcher
        stalled, self._last_round = (
            monotonic - self._last_round > 4 * _EVERY_S,
            monotonic,
        )  # received beats may be unread
        for entry in list(board.entries.values()):
            if entry.is_stopping:
                continue
            if entry.ends_at <= monotonic:
                board.stop(entry, expired=True)
            elif (
                entry.is_leased
                and entry.orphaned_since is not None
                and monotonic - entry.orphaned_since > self._orphan_s
            ):
                board.counts["orphans"] += 1
                board.stop(entry)
        for worker in list(board.workers.values()):
            if (
                not stalled
                and worker.is_connected
                and monotonic - worker.last_message_at > _MAX_MISSED_HEARTBEATS * heartbeat_s(self.away_s)
            ):
                worker.mark_away(monotonic)
            elif not worker.is_connected and monotonic - worker.away_since > self.away_s:
                remove_worker(board, worker)


def restore(dispatcher: Dispatcher, row: Row[Any], programs: dict[str, str]) -> None:
    """Restore a sandbox of an earlier server, with the states of its programs; its worker may come back.

    Raises:
        SandboxRequestError, TypeError: the row is corrupt.
    """
    spec, created = spec_from_json(parse_row_json(row.spec)), row.created + 0.0
    left = min(row.expires - time.time(), row.expires - created)  # a clock that was set back must not add time
    ends = time.monotonic() + left
    away = WorkerLink(row.worker, None, away_since=time.monotonic())
    worker = dispatcher.workers.setdefault(row.worker, away)
    state, leased = row.state, bool(row.leased)
    entry = Entry(row.owner, row.name, spec, worker, created, ends, state=state, is_leased=leased)
    entry.orphaned_since = time.monotonic()
    for program, state in programs.items():
        entry.programs[program] = Program(None, True, has_ended=state != "running")
    dispatcher.quotas.count_programs(entry.owner, entry.num_running)
    dispatcher.quotas.add_sandbox(entry.owner, spec)
    dispatcher.add(entry)


def remove_worker(dispatcher: Dispatcher, worker: WorkerLink) -> None:
    """Remove a worker that does not come back; its sandboxes are lost."""
    del dispatcher.workers[worker.name]
    for entry in list_sandboxes(dispatcher, worker):
        mark_lost(dispatcher, entry, f"its worker '{worker.name}' did not reconnect")


def mark_lost(dispatcher: Dispatcher, entry: Entry, reason: str) -> None:
    """Mark a sandbox as lost: it is gone, and the results of its programs are unknown."""
    said: dict[str, Any] = {"op": "gone", "sandbox": entry.qualified_name}
    dispatcher.on_worker_message({**said, **error_to_json(SandboxLostError(f"the sandbox is lost: {reason}"))})


def list_sandboxes(dispatcher: Dispatcher, worker: WorkerLink) -> list[Entry]:
    """Return the sandboxes of one worker."""
    return [entry for entry in dispatcher.entries.values() if entry.worker is worker]
