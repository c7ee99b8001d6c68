"""The service's records of sandboxes and programs in the database. A new server process recovers from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from sqlalchemy import Row, bindparam, delete, insert, select, update

from roll_sandbox.results import is_valid_end_report
from roll_sandbox.service.store import Store
from roll_sandbox.service.store.tables import executions, owners, sandboxes, workers
from roll_sandbox.wire import Message

__all__ = ["LIVE_STATES", "ProgramRecord", "RecordStore", "WorkerRecord", "parse_row_json"]

LIVE_STATES = ("starting", "running")
_Callback: TypeAlias = Callable[[Exception | None], None]
_ENDED_RETENTION_S = 3600.0
"""Seconds for which records of ended sandboxes are kept."""
_WORKER_RETENTION_S = 7 * 86400.0
"""Seconds for which the name of a worker stays reserved for its owner."""

_SANDBOX_KEY = (sandboxes.c.owner == bindparam("b_owner"), sandboxes.c.name == bindparam("b_name"))
_PROGRAMS_OF_SANDBOX = (executions.c.owner == bindparam("b_owner"), executions.c.sandbox == bindparam("b_sandbox"))
_INSERT_SANDBOX = insert(sandboxes)
_UPDATE_RUNNING = update(sandboxes).where(*_SANDBOX_KEY).values(state="running")
_UPDATE_LIFETIME = update(sandboxes).where(*_SANDBOX_KEY).values(expires=bindparam("b_expires"))
_UPDATE_SANDBOX_END = (
    update(sandboxes)
    .where(*_SANDBOX_KEY)
    .values(state=bindparam("b_state"), ended=bindparam("b_ended"), why=bindparam("b_why"))
)
_INSERT_PROGRAM = insert(executions)
# Only the first end counts, since a worker resends ends over each new connection.
_UPDATE_PROGRAM_END = (
    update(executions)
    .where(*_PROGRAMS_OF_SANDBOX, executions.c.name == bindparam("b_name"), executions.c.state == "running")
    .values(state=bindparam("b_state"), end=bindparam("b_end"), pieces=bindparam("b_pieces"))
)
_UPDATE_PROGRAMS_LOST = (
    update(executions).where(*_PROGRAMS_OF_SANDBOX, executions.c.state == "running").values(state="lost")
)
# The condition includes the time of creation, so that only the row of the refused attempt is deleted.
_UNDO_SANDBOX = delete(sandboxes).where(*_SANDBOX_KEY, sandboxes.c.created == bindparam("b_created"))
_UNDO_PROGRAM = delete(executions).where(
    *_PROGRAMS_OF_SANDBOX, executions.c.name == bindparam("b_name"), executions.c.started == bindparam("b_started")
)


@dataclass(frozen=True)
class ProgramRecord:
    """The database record of a program, whether it is running or has ended."""

    state: str
    started: float
    end: Message | None
    """The end that the worker reported; `None` if there is none, or if the row is corrupt."""


@dataclass(frozen=True)
class WorkerRecord:
    """The database record of a worker, with the owner of its name and its draining state."""

    name: str
    owner: str
    seen: float
    """Time when the worker was last seen, in seconds since 1970."""
    draining: int


class RecordStore:
    """Writes and reads the records of a service. Methods with a `callback` call it when the record is in the database.

    `record_sandbox` and `record_program` write intents, which are rejected while the database is unavailable. All other
    methods write facts, which are queued until the database is available again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def record_sandbox(
        self,
        owner: str,
        name: str,
        worker: str,
        spec: dict[str, Any],
        expires: float,
        callback: _Callback,
        *,
        leased: bool = True,
    ) -> None:
        """Record that a sandbox is about to start. A `leased` sandbox is stopped when no client is connected to it."""
        row = {"owner": owner, "name": name, "worker": worker, "state": "starting", "spec": json.dumps(spec)}
        row |= {"created": time.time(), "expires": expires, "why": "", "leased": int(leased)}
        self._store.write(_INSERT_SANDBOX, row, callback, undo=_UNDO_SANDBOX)

    def record_running(self, owner: str, name: str) -> None:
        """Record that a sandbox has started."""
        self._store.write(_UPDATE_RUNNING, {"b_owner": owner, "b_name": name})

    def record_lifetime(self, owner: str, name: str, expires: float) -> None:
        """Record a sandbox's new lifetime."""
        self._store.write(_UPDATE_LIFETIME, {"b_owner": owner, "b_name": name, "b_expires": expires})

    def record_sandbox_end(self, owner: str, name: str, state: str, reason: str, callback: _Callback | None) -> None:
        """Record that a sandbox has ended, and that the programs that were running in it are lost."""
        self._store.write(_UPDATE_PROGRAMS_LOST, {"b_owner": owner, "b_sandbox": name})
        values = {"b_owner": owner, "b_name": name, "b_state": state, "b_ended": time.time(), "b_why": reason}
        self._store.write(_UPDATE_SANDBOX_END, values, callback)

    def record_program(self, owner: str, sandbox: str, name: str, callback: _Callback) -> None:
        """Record that a program is about to start; the write is rejected if the name was used before."""
        row = {"owner": owner, "sandbox": sandbox, "name": name, "state": "running", "started": time.time()}
        values = {**row, "pieces": 0, "output_bytes": 0}
        self._store.write(_INSERT_PROGRAM, values, callback, undo=_UNDO_PROGRAM)

    def record_program_end(self, owner: str, sandbox: str, name: str, message: Message, callback: _Callback) -> None:
        """Record a program's end, as its worker reported it."""
        failed = message["op"] == "error"
        state = ("lost" if message.get("error") == "lost" else "failed") if failed else "ended"
        end = {key: value for key, value in message.items() if key not in ("op", "sandbox", "id")}
        values = {"b_owner": owner, "b_sandbox": sandbox, "b_name": name, "b_state": state, "b_end": json.dumps(end)}
        self._store.write(_UPDATE_PROGRAM_END, {**values, "b_pieces": message.get("pieces", 0)}, callback)

    def load_live_sandboxes(self) -> Sequence[Row[Any]]:
        """Return the rows of all sandboxes that have not ended."""
        return self._store.read(select(sandboxes).where(sandboxes.c.state.in_(LIVE_STATES)))

    def load_live_programs(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the states of all programs in live sandboxes: `{(owner, sandbox): {program: state}}`."""
        states: dict[tuple[str, str], dict[str, str]] = {}
        same_sandbox = (sandboxes.c.owner == executions.c.owner) & (sandboxes.c.name == executions.c.sandbox)
        rows = select(executions.c.owner, executions.c.sandbox, executions.c.name, executions.c.state)
        for row in self._store.read(rows.join(sandboxes, same_sandbox).where(sandboxes.c.state.in_(LIVE_STATES))):
            states.setdefault((row.owner, row.sandbox), {})[row.name] = row.state
        return states

    def load_sandbox(self, owner: str, name: str) -> Row[Any] | None:
        """Return the row of a sandbox, whether running or ended; `None` if there is no such row."""
        rows = self._store.read(select(sandboxes).where(sandboxes.c.owner == owner, sandboxes.c.name == name))
        return rows[0] if rows else None

    def load_program(self, owner: str, sandbox: str, name: str) -> ProgramRecord | None:
        """Return the record of a program; `None` if there is no such record."""
        rows = self._store.read(
            select(executions).where(
                executions.c.owner == owner, executions.c.sandbox == sandbox, executions.c.name == name
            )
        )
        if not rows:
            return None
        end = parse_row_json(rows[0].end)
        good = isinstance(end, dict) and is_valid_end_report(end.get("end", {}))
        return ProgramRecord(rows[0].state, rows[0].started, end if good else None)

    @property
    def unavailable_reason(self) -> str:
        """The reason why writes to the database fail; empty if they succeed."""
        return self._store.unavailable_reason

    @property
    def num_waiting(self) -> int:
        """Number of writes that are not in the database yet."""
        return self._store.num_waiting

    def load_quotas(self) -> dict[str, dict[str, Any]]:
        """Return, for each owner with an individual quota, the fields of `Quota` that are set."""
        quotas = {row.owner: parse_row_json(row.quota) for row in self._store.read(select(owners))}
        return {owner: fields for owner, fields in quotas.items() if isinstance(fields, dict)}

    def load_workers(self) -> list[WorkerRecord]:
        """Return the records of all workers."""
        rows = self._store.read(select(workers))
        return [WorkerRecord(row.name, row.owner, row.seen, row.draining) for row in rows]

    def record_worker(self, row: WorkerRecord, *, exists: bool) -> None:
        """Record a worker: update its row if the table already has one (`exists`), otherwise insert it."""
        self._store.write(
            _UPDATE_WORKER if exists else _INSERT_WORKER, {f"b_{name}": value for name, value in vars(row).items()}
        )

    def set_quota(self, owner: str, fields: dict[str, Any]) -> None:
        """Replace the fields of an owner's quota; without any field, the default applies again."""
        forgotten = delete(owners).where(owners.c.owner == owner)
        written = insert(owners).values(owner=owner, quota=json.dumps(fields))
        self._store.write_now(forgotten, *([written] if fields else []))

    def delete_old_records(self) -> None:
        """Delete records of sandboxes and programs that ended long ago."""
        self._store.write(_DELETE_WORKERS, {"b_seen": time.time() - _WORKER_RETENTION_S})
        before = time.time() - _ENDED_RETENTION_S
        old = select(sandboxes.c.owner, sandboxes.c.name).where(sandboxes.c.ended < before)
        for row in self._store.read(old):
            values = {"b_owner": row.owner, "b_sandbox": row.name}
            self._store.write(_DELETE_PROGRAMS, values)
            self._store.write(_DELETE_SANDBOX, {"b_owner": row.owner, "b_name": row.name})


def parse_row_json(text: object) -> Any:
    """Parse the JSON of a row; return `None` if it is corrupt."""
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        return None


_WORKER_ROW = {field.name: bindparam(f"b_{field.name}") for field in fields(WorkerRecord)}
_INSERT_WORKER = insert(workers).values(_WORKER_ROW)
_UPDATE_WORKER = update(workers).where(workers.c.name == _WORKER_ROW["name"]).values({**_WORKER_ROW})
_DELETE_WORKERS = delete(workers).where(workers.c.seen < bindparam("b_seen"), workers.c.draining == 0)
_DELETE_PROGRAMS = delete(executions).where(*_PROGRAMS_OF_SANDBOX)
_DELETE_SANDBOX = delete(sandboxes).where(*_SANDBOX_KEY)
