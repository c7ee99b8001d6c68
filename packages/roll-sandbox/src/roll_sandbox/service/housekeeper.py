"""Periodic housekeeping: ends expired sandboxes, stops orphaned ones, and removes workers that do not reconnect."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Row

from roll_sandbox.errors import SandboxDatabaseError, SandboxLostError, SandboxRequestError
from roll_sandbox.service.dispatcher import AWAY_TIMEOUT_S, ORPHAN_TIMEOUT_S, Dispatcher
from roll_sandbox.service.entries import ProgramEntry, SandboxEntry
from roll_sandbox.service.records import parse_row_json
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.wire import compute_heartbeat_s, error_to_json, spec_from_json

__all__ = ["Housekeeper", "restore_sandbox"]

_INTERVAL_S = 0.5
_ROUNDS_PER_REPORT = _ROUNDS_PER_QUOTA_LOAD = 4
_ROUNDS_PER_DELETION = 120
_MAX_MISSED_HEARTBEATS = 5
_log = logging.getLogger(__name__)


class Housekeeper:
    """Runs the periodic housekeeping of a dispatcher.

    Args:
        dispatcher: the service's dispatcher.
        orphan_s: see `dispatcher.ORPHAN_TIMEOUT_S`.
        away_s: see `dispatcher.AWAY_TIMEOUT_S`.
        report: function that updates the report of the worker in this process, if there is one.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        orphan_s: float = ORPHAN_TIMEOUT_S,
        away_s: float = AWAY_TIMEOUT_S,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._orphan_s = orphan_s
        self.away_s = away_s
        self._report = report
        self._last_round = math.inf

    async def recover(self, local_worker: str) -> None:
        """Restore the sandboxes of an earlier server process, except the sandboxes of that process's local worker.

        The sandboxes of the worker named `local_worker` ended with the process, so they are recorded as lost. Other
        workers may reconnect.
        """
        rows = await asyncio.to_thread(self._dispatcher.records.load_live_sandboxes)
        programs = await asyncio.to_thread(self._dispatcher.records.load_live_programs)
        for row in rows:
            try:
                if row.worker != local_worker:
                    restore_sandbox(self._dispatcher, row, programs.get((row.owner, row.name), {}))
                    continue
            except (SandboxRequestError, TypeError) as error:
                _log.warning("the database row of sandbox '%s' is corrupt, so the sandbox is lost: %s", row.name, error)
            self._dispatcher.records.record_sandbox_end(row.owner, row.name, "ended", "lost", None)

    async def run(self) -> None:
        """Run the housekeeping until canceled."""
        turns = 0
        while True:
            await asyncio.sleep(_INTERVAL_S)
            turns += 1
            self.run_round(time.monotonic())
            try:
                await self._run_periodic_tasks(turns)
            except SandboxDatabaseError:  # retried in the next round
                continue
            except Exception:  # the loop must not end, since it ends expired sandboxes
                _log.exception("the sandbox service's housekeeping failed and will be retried")

    async def _run_periodic_tasks(self, num_rounds: int) -> None:
        await asyncio.to_thread(self._dispatcher.audit.flush)
        if num_rounds % _ROUNDS_PER_REPORT == 1:
            self._report()
        if num_rounds % _ROUNDS_PER_QUOTA_LOAD == 0:
            self._dispatcher.quotas.set_overrides(await asyncio.to_thread(self._dispatcher.records.load_quotas))
        if num_rounds % _ROUNDS_PER_DELETION == 0:
            await asyncio.to_thread(self._dispatcher.records.delete_old_records)

    def run_round(self, monotonic: float) -> None:
        """Stop expired and orphaned sandboxes, and disconnect or remove silent workers, as of the time `monotonic`."""
        dispatcher = self._dispatcher
        # After a stall of this process, there may be heartbeats that have arrived but have not been read.
        stalled, self._last_round = monotonic - self._last_round > 4 * _INTERVAL_S, monotonic
        for entry in list(dispatcher.entries.values()):
            if entry.is_stopping:
                continue
            if entry.ends_at <= monotonic:
                dispatcher.stop(entry, expired=True)
            elif (
                entry.is_leased
                and entry.orphaned_since is not None
                and monotonic - entry.orphaned_since > self._orphan_s
            ):
                dispatcher.counts["orphans"] += 1
                dispatcher.stop(entry)
        for worker in list(dispatcher.workers.values()):
            if (
                not stalled
                and worker.is_connected
                and monotonic - worker.last_message_at > _MAX_MISSED_HEARTBEATS * compute_heartbeat_s(self.away_s)
            ):
                worker.mark_disconnected(monotonic)
            elif not worker.is_connected and monotonic - worker.disconnected_since > self.away_s:
                remove_worker(dispatcher, worker)


def restore_sandbox(dispatcher: Dispatcher, row: Row[Any], programs: dict[str, str]) -> None:
    """Restore a sandbox of an earlier server, with the states of its programs; its worker may reconnect.

    Raises:
        SandboxRequestError, TypeError: the row is corrupt.
    """
    spec, created = spec_from_json(parse_row_json(row.spec)), row.created + 0.0
    # If the system clock was set back, the lifetime must not become longer.
    left = min(row.expires - time.time(), row.expires - created)
    ends = time.monotonic() + left
    away = WorkerLink(row.worker, None, disconnected_since=time.monotonic())
    worker = dispatcher.workers.setdefault(row.worker, away)
    state, leased = row.state, bool(row.leased)
    entry = SandboxEntry(row.owner, row.name, spec, worker, created, ends, state=state, is_leased=leased)
    entry.orphaned_since = time.monotonic()
    for program, state in programs.items():
        entry.programs[program] = ProgramEntry(None, True, has_ended=state != "running")
    dispatcher.quotas.add_programs(entry.owner, entry.num_running)
    dispatcher.quotas.add_sandbox(entry.owner, spec)
    dispatcher.add_sandbox(entry)


def remove_worker(dispatcher: Dispatcher, worker: WorkerLink) -> None:
    """Remove a worker that does not reconnect, and treat its sandboxes as lost."""
    del dispatcher.workers[worker.name]
    for entry in list_sandboxes(dispatcher, worker):
        mark_lost(dispatcher, entry, f"its worker '{worker.name}' did not reconnect")


def mark_lost(dispatcher: Dispatcher, entry: SandboxEntry, reason: str) -> None:
    """Remove a sandbox as lost, and report to its clients that the results of its programs are unknown."""
    report: dict[str, Any] = {"op": "gone", "sandbox": entry.qualified_name}
    dispatcher.on_worker_message({**report, **error_to_json(SandboxLostError(f"the sandbox is lost: {reason}"))})


def list_sandboxes(dispatcher: Dispatcher, worker: WorkerLink) -> list[SandboxEntry]:
    """Return the sandboxes of one worker."""
    return [entry for entry in dispatcher.entries.values() if entry.worker is worker]
