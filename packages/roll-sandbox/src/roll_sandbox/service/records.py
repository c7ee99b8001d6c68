"""The service's records of sandboxes and programs in its database, from which it recovers when it starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from sqlalchemy import Row, bindparam, delete, insert, select, update

from roll_sandbox.results import is_valid_end
from roll_sandbox.service.store import Store
from roll_sandbox.service.store.tables import executions, owners, sandboxes, workers
from roll_sandbox.wire import Message

__all__ = ["ALIVE", "ProgramRecord", "Records", "WorkerRecord", "parse_row_json"]

ALIVE = ("starting", "running")
_Callback: TypeAlias = Callable[[Exception | None], None]
_KEEP_ENDED_S = 3600.0
"""How long records of ended sandboxes are kept."""
_KEEP_WORKERS_S = 7 * 86400.0
"""How long a worker's name stays reserved for its owner."""

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
_UPDATE_PROGRAM_END = (
    update(executions)
    .where(*_PROGRAMS_OF_SANDBOX, executions.c.name == bindparam("b_name"), executions.c.state == "running")
    .values(state=bindparam("b_state"), end=bindparam("b_end"), pieces=bindparam("b_pieces"))
)
_UPDATE_PROGRAMS_LOST = (
    update(executions).where(*_PROGRAMS_OF_SANDBOX, executions.c.state == "running").values(state="lost")
)
_UNDO_SANDBOX = delete(sandboxes).where(*_SANDBOX_KEY, sandboxes.c.created == bindparam("b_created"))
_UNDO_PROGRAM = delete(executions).where(
    *_PROGRAMS_OF_SANDBOX, executions.c.name == bindparam("b_name"), executions.c.started == bindparam("b_started")
)


@dataclass(frozen=True)
class ProgramRecord:
    """One program, also one that has ended."""

    state: str
    started: float
    end: Message | None
    """Its end as reported by its worker, if it has one that can be read."""


@dataclass(frozen=True)
class WorkerRecord:
    """A worker's name, and the owner it belongs to."""

    name: str
    owner: str
    seen: float
    """Seconds since 1970."""
    draining: int


class Records:
    """The records of a service; see the module. Only calls with `callback` report when the database has written them.

    `opened` and `started` are intents, refused while the database is away; all others are facts and wait for it.
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
        """Record that a sandbox is about to start. `leased`: it ends once no client has a connection to it."""
        row = {"owner": owner, "name": name, "worker": worker, "state": "starting", "spec": json.dumps(spec)}
        row |= {"created": time.time(), "expires": expires, "why": "", "leased": int(leased)}
        self._store.write(_INSERT_SANDBOX, row, callback, undo=_UNDO_SANDBOX)

    def record_running(self, owner: str, name: str) -> None:
        """Record that a sandbox has started."""
        self._store.write(_UPDATE_RUNNING, {"b_owner": owner, "b_name": name})

    def record_lifetime(self, owner: str, name: str, expires: float) -> None:
        """Record a sandbox's new lifetime."""
        self._store.write(_UPDATE_LIFETIME, {"b_owner": owner, "b_name": name, "b_expires": expires})

    def record_sandbox_end(self, owner: str, name: str, state: str, why: str, callback: _Callback | None) -> None:
        """Record that a sandbox has ended; programs that ran in it are lost."""
        self._store.write(_UPDATE_PROGRAMS_LOST, {"b_owner": owner, "b_sandbox": name})
        values = {"b_owner": owner, "b_name": name, "b_state": state, "b_ended": time.time(), "b_why": why}
        self._store.write(_UPDATE_SANDBOX_END, values, callback)

    def record_program(self, owner: str, sandbox: str, name: str, callback: _Callback) -> None:
        """Record that a program is about to start; refused if its name was used before."""
        row = {"owner": owner, "sandbox": sandbox, "name": name, "state": "running", "started": time.time()}
        values = {**row, "pieces": 0, "output_bytes": 0}
        self._store.write(_INSERT_PROGRAM, values, callback, undo=_UNDO_PROGRAM)

    def record_program_end(self, owner: str, sandbox: str, name: str, said: Message, callback: _Callback) -> None:
        """Record a program's end, as its worker reported it."""
        failed = said["op"] == "error"
        state = ("lost" if said.get("error") == "lost" else "failed") if failed else "ended"
        end = {key: value for key, value in said.items() if key not in ("op", "sandbox", "id")}
        values = {"b_owner": owner, "b_sandbox": sandbox, "b_name": name, "b_state": state, "b_end": json.dumps(end)}
        self._store.write(_UPDATE_PROGRAM_END, {**values, "b_pieces": said.get("pieces", 0)}, callback)

    def load_live_sandboxes(self) -> Sequence[Row[Any]]:
        """Return the sandboxes of an earlier server that have not ended."""
        return self._store.read(select(sandboxes).where(sandboxes.c.state.in_(ALIVE)))

    def load_live_programs(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the names and states of all programs of live sandboxes, by owner and sandbox."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        one = (sandboxes.c.owner == executions.c.owner) & (sandboxes.c.name == executions.c.sandbox)
        rows = select(executions.c.owner, executions.c.sandbox, executions.c.name, executions.c.state)
        for row in self._store.read(rows.join(sandboxes, one).where(sandboxes.c.state.in_(ALIVE))):
            found.setdefault((row.owner, row.sandbox), {})[row.name] = row.state
        return found

    def load_sandbox(self, owner: str, name: str) -> Row[Any] | None:
        """Return the row of one sandbox, also of one that has ended; `None` if it does not exist."""
        rows = self._store.read(select(sandboxes).where(sandboxes.c.owner == owner, sandboxes.c.name == name))
        return rows[0] if rows else None

    def load_program(self, owner: str, sandbox: str, name: str) -> ProgramRecord | None:
        """Return one program, with its end if that can be read; `None` if it does not exist."""
        rows = self._store.read(
            select(executions).where(
                executions.c.owner == owner, executions.c.sandbox == sandbox, executions.c.name == name
            )
        )
        if not rows:
            return None
        end = parse_row_json(rows[0].end)
        good = isinstance(end, dict) and is_valid_end(end.get("end", {}))
        return ProgramRecord(rows[0].state, rows[0].started, end if good else None)

    @property
    def unavailable_reason(self) -> str:
        """Why the database cannot be written; empty while it answers."""
        return self._store.unavailable_reason

    @property
    def num_waiting(self) -> int:
        """Number of writes that are not in the database yet."""
        return self._store.num_waiting

    def load_quotas(self) -> dict[str, dict[str, Any]]:
        """Return the quotas that are set, by owner."""
        found = {row.owner: parse_row_json(row.quota) for row in self._store.read(select(owners))}
        return {owner: fields for owner, fields in found.items() if isinstance(fields, dict)}

    def load_workers(self) -> list[WorkerRecord]:
        """Return the names that workers have or had, with their owners and whether they are draining."""
        rows = self._store.read(select(workers))
        return [WorkerRecord(row.name, row.owner, row.seen, row.draining) for row in rows]

    def record_worker(self, row: WorkerRecord, *, known: bool) -> None:
        """Record that a worker was seen; `known`: it is among `workers`."""
        self._store.write(
            _UPDATE_WORKER if known else _INSERT_WORKER, {f"b_{name}": value for name, value in vars(row).items()}
        )

    def set_quota(self, owner: str, fields: dict[str, Any]) -> None:
        """Replace an owner's quota; with no fields, the default applies again."""
        forgotten = delete(owners).where(owners.c.owner == owner)
        written = insert(owners).values(owner=owner, quota=json.dumps(fields))
        self._store.write_now(forgotten, *([written] if fields else []))

    def delete_old(self) -> None:
        """Delete records of what ended long ago."""
        self._store.write(_DELETE_WORKERS, {"b_seen": time.time() - _KEEP_WORKERS_S})
        before = time.time() - _KEEP_ENDED_S
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
