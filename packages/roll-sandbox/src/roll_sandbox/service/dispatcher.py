"""Passes messages between clients and workers, and records the owner, worker and end of each sandbox and program.

    client connection ──► dispatcher ──► worker link
                            ├ a program is recorded before it is sent to its worker
                            └ its end is recorded before it is sent to its client

Invariants:
    - everything runs in one event loop;
    - a name starts at most one program, once;
    - a program whose end was not recorded is reported as lost, an error, and is never run again;
    - an owner cannot see the names of other owners.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from roll_sandbox.errors import RollSandboxError, SandboxDatabaseError, SandboxLostError, UnknownSandboxError
from roll_sandbox.service.audit import AuditLog
from roll_sandbox.service.entries import ClientConnection, ProgramEntry, SandboxEntry
from roll_sandbox.service.placement import choose_worker
from roll_sandbox.service.quotas import Quotas
from roll_sandbox.service.records import RecordStore
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.uploads import UploadStore
from roll_sandbox.wire import Message, error_to_json, spec_from_json, spec_to_json

__all__ = ["ClientConnection", "Dispatcher", "SandboxEntry"]

ORPHAN_TIMEOUT_S = 60.0
"""Seconds after which the sandboxes of a disconnected client are stopped."""
AWAY_TIMEOUT_S = 60.0
"""Seconds after which the sandboxes of a disconnected worker are lost."""


class Dispatcher:
    """Passes messages between clients and workers. `lifetime_s` is the default lifetime of sandboxes."""

    def __init__(self, records: RecordStore, quotas: Quotas, audit: AuditLog, *, lifetime_s: float = 3600.0) -> None:
        self.records = records
        self.quotas = quotas
        self.audit = audit
        self.workers: dict[str, WorkerLink] = {}
        self.entries: dict[str, SandboxEntry] = {}
        self.counts: Counter[str] = Counter()
        self.uploads = UploadStore()
        self._lifetime_s = lifetime_s

    def on_client_message(self, connection: ClientConnection, message: Message) -> None:
        """Handle a validated message from a client; errors are sent to the client."""
        op, name = message["op"], message["sandbox"]
        entry = self.entries.get(f"{connection.identity.owner}/{name}")
        try:
            if op == "create":
                self._create_sandbox(connection, entry, message)
                return
            if op == "upload":
                self.uploads.add(connection.identity.owner, name, message["files"])
                return
            if entry is None:
                if op == "stop":
                    connection.deliver({"op": "gone", "sandbox": name, **_UNKNOWN_SANDBOX_ERROR})
                    return
                raise UnknownSandboxError(f"sandbox '{name}' of owner '{connection.identity.owner}' does not exist.")
            if op == "look":
                # This is not treated as use: it must not prevent an orphaned sandbox from being stopped.
                entry.inspections[message["id"]] = connection
                entry.send({**message, "sandbox": entry.qualified_name})
                return
            entry.connections.add(connection)
            entry.orphaned_since = None
            if op == "extend":
                self.extend(entry, message.get("lifetime_s"))
                if "id" in message:
                    connection.deliver({"op": "extended", **_copy_names(message)})
            elif op == "stop":
                self._record_audit(connection, "stop", entry)
                self.stop(entry)
            elif op == "attach":
                entry.send({"op": "attach", "sandbox": entry.qualified_name})
            elif op in ("run", "line", "shell"):
                self._start_program(connection, entry, message)
            else:
                self._forward_to_program(entry, message)
        except (RollSandboxError, ValueError) as error:
            self.counts["refused"] += 1
            op = "error" if "id" in message else "failed"
            connection.deliver({**error_to_json(error), "op": op, **_copy_names(message)})

    def _create_sandbox(self, connection: ClientConnection, entry: SandboxEntry | None, message: Message) -> None:
        if entry is not None:  # the message was resent
            entry.connections.add(connection)
            entry.orphaned_since = None
            if entry.properties:
                connection.deliver({"op": "created", "sandbox": entry.name, "traits": entry.properties})
            return
        owner, name = connection.identity.owner, message["sandbox"]
        spec = self.quotas.check_sandbox(owner, spec_from_json(message["spec"]))
        self.uploads.check(owner, spec)
        fields = spec_to_json(spec)
        lifetime_s = self.quotas.resolve_lifetime_s(owner, message.get("lifetime_s"), self._lifetime_s)
        near = self.entries.get(f"{owner}/{message.get('near')}")
        worker = choose_worker(self.workers.values(), spec, preferred_worker=near.worker if near else None)
        # Counted before the database write, so that requests during the write include it.
        self.quotas.add_sandbox(owner, spec)
        entry = SandboxEntry(owner, name, spec, worker, time.time(), time.monotonic() + lifetime_s, queued=[])
        entry.is_leased = connection.holds_leases
        entry.connections.add(connection)
        self.add_sandbox(entry)
        self._record_audit(connection, "create", entry)

        def on_written(error: Exception | None) -> None:
            queued = entry.pop_queued()
            if self.entries.get(entry.qualified_name) is not entry:  # its worker was removed meanwhile
                return
            if error is not None:
                self._remove_sandbox(entry)
                self._broadcast(entry, {"op": "failed", "sandbox": name, **error_to_json(error)})
                return
            for each in (self.make_create_message(entry), *queued):
                entry.send(each)

        self.records.record_sandbox(owner, name, worker.name, fields, entry.expires, on_written, leased=entry.is_leased)

    def make_create_message(self, entry: SandboxEntry) -> Message:
        """Return the message that starts a sandbox on its worker, with the uploads that the worker still needs."""
        link = entry.worker
        uploads = self.uploads.select(entry.owner, entry.spec, exclude=link.uploads)
        link.uploads.update(uploads)
        order = {"op": "create", "sandbox": entry.qualified_name, "spec": spec_to_json(entry.spec)}
        return {**order, "uploads": uploads} if uploads else order

    def _start_program(self, connection: ClientConnection, entry: SandboxEntry, message: Message) -> None:
        """Start a program, a session, or a session's command."""
        name, recorded = message["id"], message["op"] != "shell"
        forward = {**message, "sandbox": entry.qualified_name}
        program = entry.programs.get(name)
        if program is not None:
            program.connection = connection
            if program.queued is None:
                # The worker may have lost the program: with `again`, it reports this instead of starting it once more.
                entry.send({**forward, "again": True} if recorded else forward)
            return
        if recorded:
            cpu_s = message["request"].get("cpu_s")
            self.quotas.check_cpu(entry.owner, cpu_s if isinstance(cpu_s, int | float) else None)
            self.quotas.add_program(entry.owner)
        program = entry.programs[name] = ProgramEntry(connection, recorded, [] if recorded else None)
        if not recorded:
            entry.send(forward)
            return
        self._record_audit(connection, "run", entry)
        self.counts["programs"] += 1

        def on_written(error: Exception | None) -> None:
            queued, program.queued = program.queued or [], None
            if error is not None:
                self._mark_ended(entry, program)
                if isinstance(error, SandboxDatabaseError):
                    entry.programs.pop(name, None)  # the program was not started, so its name may be used again
                else:
                    error = SandboxLostError(str(error))
                program.deliver({**error_to_json(error), "op": "error", **_copy_names(message)})
                return
            for each in (forward, *queued):
                entry.send(each)

        self.records.record_program(entry.owner, entry.name, name, on_written)

    def _forward_to_program(self, entry: SandboxEntry, message: Message) -> None:
        forward = {**message, "sandbox": entry.qualified_name}
        most = self.quotas.get(entry.owner).cpu_s
        if message["op"] == "bound" and most is not None:
            forward["cpu_s"] = min(most, message.get("cpu_s") or most)
        program = entry.programs.get(message["id"])
        if program is not None and program.queued is not None:
            program.queued.append(forward)
        else:
            entry.send(forward)

    def extend(self, entry: SandboxEntry, lifetime_s: float | None) -> None:
        """Set a sandbox's lifetime, in seconds from now.

        Raises:
            SandboxQuotaError: the lifetime exceeds the owner's quota.
            UnknownSandboxError: the sandbox is being ended.
        """
        if entry.is_stopping:
            raise UnknownSandboxError(f"the sandbox '{entry.name}' is shutting down and cannot be extended.")
        entry.ends_at = time.monotonic() + self.quotas.resolve_lifetime_s(entry.owner, lifetime_s, self._lifetime_s)
        self.records.record_lifetime(entry.owner, entry.name, entry.expires)

    def stop(self, entry: SandboxEntry, *, expired: bool = False) -> None:
        """Request the end of a sandbox, without waiting for it; `expired` is true if its lifetime is over."""
        entry.is_stopping = True
        entry.send({"op": "stop", "sandbox": entry.qualified_name, "expired": expired})

    def disconnect(self, connection: ClientConnection) -> None:
        """Remove a client connection that was closed or lost."""
        for entry in self.entries.values():
            entry.inspections = {key: each for key, each in entry.inspections.items() if each is not connection}
            if connection in entry.connections:
                entry.connections.discard(connection)
                if not entry.connections:
                    entry.orphaned_since = time.monotonic()
            for program in entry.programs.values():
                if program.connection is connection:
                    program.connection = None

    def on_worker_message(self, message: Message, worker: WorkerLink | None = None) -> None:
        """Handle a message from a worker about one of its sandboxes. `worker=None` is the worker in this process."""
        op = message["op"]
        entry = self.entries.get(message["sandbox"])
        # A worker may report only on sandboxes that were placed on it.
        if entry is None or worker not in (None, entry.worker):
            if op == "created" and worker is not None:  # the sandbox was lost or stopped while it started
                worker.send({"op": "stop", "sandbox": message["sandbox"]})
            return
        message = {**message, "sandbox": entry.name}
        program = entry.programs.get(message.get("id", ""))
        inspector = entry.inspections.pop(message.get("id", ""), None)
        if inspector is not None:
            inspector.deliver(message)
        elif op == "out" or op == "used":
            if program is not None:
                program.deliver(message)
        elif op in ("end", "error"):
            if program is not None:
                self._on_program_end(entry, program, message)
        elif op == "created":
            entry.properties = message["traits"]
            if entry.state == "starting":
                entry.state = "running"
                self.counts["sandboxes"] += 1
                self.records.record_running(entry.owner, entry.name)
            self._broadcast(entry, message)
        elif op in ("gone", "failed"):
            self.end_sandbox(entry, message)

    def _on_program_end(self, entry: SandboxEntry, program: ProgramEntry, message: Message) -> None:
        name = message["id"]
        if not program.is_recorded or program.has_ended:
            # A session was opened, or a worker has resent the end over a new connection. While the database write of
            # the end is pending, the end is not delivered: a client must never see an end that may be lost.
            if not program.is_end_pending:
                program.deliver(message)
            return
        self._mark_ended(entry, program)
        self.counts["failed" if message["op"] == "error" else "ended"] += 1
        program.is_end_pending = True

        def on_written(error: Exception | None) -> None:
            program.is_end_pending = False
            failed = {} if error is None else {**error_to_json(error), "op": "error", **_copy_names(message)}
            program.deliver(failed or message)

        self.records.record_program_end(entry.owner, entry.name, name, message, on_written)

    def _mark_ended(self, entry: SandboxEntry, program: ProgramEntry) -> None:
        if not program.has_ended:
            program.has_ended = True
            if program.is_recorded:
                self.quotas.remove_programs(entry.owner)

    def end_sandbox(self, entry: SandboxEntry, message: Message) -> None:
        """Remove a sandbox that has ended or did not start, and inform its clients."""
        self._remove_sandbox(entry)
        kind = str(message.get("error", ""))
        state = "failed" if message["op"] == "failed" else "ended"
        self.counts[f"sandboxes_{kind or state}"] += 1
        report = {**message, "sandbox": entry.name}
        connections = list(entry.connections)

        def on_written(_: Exception | None) -> None:
            for connection in connections:
                connection.deliver(report)

        self.records.record_sandbox_end(entry.owner, entry.name, state, kind, on_written)

    def _broadcast(self, entry: SandboxEntry, message: Message) -> None:
        for connection in list(entry.connections):
            connection.deliver(message)

    def resume_sandbox(self, entry: SandboxEntry, traits: dict[str, Any], known_programs: list[str]) -> None:
        """Resume a sandbox whose worker has reconnected; programs that the worker does not report are lost.

        Messages to the programs in `known_programs` may have been lost with the connection, so the clients are asked to
        resend all messages; the worker ignores messages whose number it has already handled.
        """
        self.on_worker_message({"op": "created", "sandbox": entry.qualified_name, "traits": traits})
        # The worker cannot know programs whose messages are still queued for it.
        sent_soon = {message.get("id") for message in entry.worker.queued}
        for name, program in list(entry.programs.items()):
            is_running = program.is_recorded and not program.has_ended and program.queued is None
            if is_running and name not in {*known_programs, *sent_soon}:
                lost = error_to_json(
                    SandboxLostError("the connection to the worker was lost, and the outcome of the program is unknown")
                )
                self.on_worker_message({**lost, "op": "error", "sandbox": entry.qualified_name, "id": name})
        self._broadcast(entry, {"op": "again", "sandbox": entry.name})

    def add_sandbox(self, entry: SandboxEntry) -> None:
        """Add a sandbox, and count it against its worker's capacity; the caller counts it against the owner's quota."""
        self.entries[entry.qualified_name] = entry
        entry.worker.num_sandboxes += 1
        entry.worker.num_placed += 1
        entry.worker.reserved_memory_bytes += entry.spec.limits.memory_bytes

    def _remove_sandbox(self, entry: SandboxEntry) -> None:
        for program in entry.programs.values():
            self._mark_ended(entry, program)
        if self.entries.pop(entry.qualified_name, None) is not None:
            entry.worker.num_sandboxes -= 1
            entry.worker.reserved_memory_bytes -= entry.spec.limits.memory_bytes
            self.quotas.remove_sandbox(entry.owner, entry.spec)

    def _record_audit(self, connection: ClientConnection, action: str, entry: SandboxEntry) -> None:
        identity = connection.identity
        self.audit.record(action, owner=identity.owner, token=identity.token, target=entry.name, peer=connection.peer)

    def list_sandboxes(self, owner: str) -> Iterator[SandboxEntry]:
        """Return an iterator over an owner's sandboxes."""
        return (entry for entry in list(self.entries.values()) if entry.owner == owner)

    def find_sandbox(self, owner: str, name: str) -> SandboxEntry:
        """Return a sandbox of an owner.

        Raises:
            UnknownSandboxError: the owner has no such sandbox.
        """
        entry = self.entries.get(f"{owner}/{name}")
        if entry is None:
            raise UnknownSandboxError(f"sandbox '{name[:64]}' of owner '{owner}' does not exist.")
        return entry


_UNKNOWN_SANDBOX_ERROR = error_to_json(UnknownSandboxError("the sandbox has ended"))


def _copy_names(message: Message) -> dict[str, Any]:
    return {name: message[name] for name in ("sandbox", "id") if name in message}
