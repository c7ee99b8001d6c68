"""Connects clients and workers: records the owner, the worker and the end of each sandbox and program.

    connection of a client ──► switchboard ──► link of a worker
                            ├ a program is recorded before it is sent to its worker
                            └ its end is recorded before it is sent to its client

Invariants: one event loop; a name starts one program, once; a program whose end was not recorded is lost, which is an
error, and never run again; names of other owners are unknown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from roll_sandbox.errors import RollSandboxError, SandboxDatabaseError, SandboxLostError, UnknownSandboxError
from roll_sandbox.service.audit import Audit
from roll_sandbox.service.entries import ClientLine, Entry, Program
from roll_sandbox.service.links import WorkerLink
from roll_sandbox.service.placement import choose
from roll_sandbox.service.quotas import Quotas
from roll_sandbox.service.records import Records
from roll_sandbox.uploads import OwnedUploads
from roll_sandbox.wire import Message, failure_said, spec_of, spec_said

__all__ = ["ClientLine", "Entry", "Switchboard"]

ORPHAN_S = 60.0
"""How long a sandbox waits for its client to reconnect."""
AWAY_S = 60.0
"""How long a worker may be away before its sandboxes are lost."""


class Switchboard:
    """The switchboard; see the module. `lifetime_s` is the default lifetime of sandboxes."""

    def __init__(self, records: Records, quotas: Quotas, audit: Audit, *, lifetime_s: float = 3600.0) -> None:
        self.records = records
        self.quotas = quotas
        self.audit = audit
        self.workers: dict[str, WorkerLink] = {}
        self.entries: dict[str, Entry] = {}
        self.counts: Counter[str] = Counter()
        self.uploads = OwnedUploads()
        self._lifetime_s = lifetime_s

    # --- from clients

    def receive(self, line: ClientLine, message: Message) -> None:
        """Handle a checked message of a client; errors are sent back to it."""
        op, name = message["op"], message["sandbox"]
        entry = self.entries.get(f"{line.identity.owner}/{name}")
        try:
            if op == "create":
                self._create(line, entry, message)
                return
            if op == "upload":
                self.uploads.add(line.identity.owner, name, message["files"])
                return
            if entry is None:
                if op == "stop":
                    line.deliver({"op": "gone", "sandbox": name, **_UNKNOWN})
                    return
                raise UnknownSandboxError(f"there is no sandbox '{name}' of '{line.identity.owner}', or no more.")
            if op == "look":
                entry.looks[message["id"]] = line
                entry.send({**message, "sandbox": entry.place})
                return
            entry.lines.add(line)
            entry.alone_since = None
            if op == "extend":
                self.extend(entry, message.get("lifetime_s"))
                if "id" in message:
                    line.deliver({"op": "extended", **_names(message)})
            elif op == "stop":
                self._note(line, "stop", entry)
                self.stop(entry)
            elif op == "attach":
                entry.send({"op": "attach", "sandbox": entry.place})
            elif op in ("run", "line", "shell"):
                self._start(line, entry, message)
            else:
                self._pass_on(entry, message)
        except (RollSandboxError, ValueError) as error:
            self.counts["refused"] += 1
            op = "error" if "id" in message else "failed"
            line.deliver({**failure_said(error), "op": op, **_names(message)})

    def _create(self, line: ClientLine, entry: Entry | None, message: Message) -> None:
        if entry is not None:  # sent again
            entry.lines.add(line)
            entry.alone_since = None
            if entry.traits:
                line.deliver({"op": "created", "sandbox": entry.name, "traits": entry.traits})
            return
        owner, name = line.identity.owner, message["sandbox"]
        spec = self.quotas.allow(owner, spec_of(message["spec"]))
        self.uploads.check(owner, spec)
        said = spec_said(spec)
        lifetime_s = self.quotas.lifetime_s(owner, message.get("lifetime_s"), self._lifetime_s)
        beside = self.entries.get(f"{owner}/{message.get('near')}")
        worker = choose(self.workers.values(), spec, near=beside.worker if beside else None)
        self.quotas.take(owner, spec)
        ends = time.monotonic() + lifetime_s
        entry = Entry(owner, name, spec, worker, time.time(), ends, leased=line.leases, lines={line}, waiting=[])
        self.add(entry)
        self._note(line, "create", entry)

        def written(error: Exception | None) -> None:
            waiting = entry.written()
            if self.entries.get(entry.place) is not entry:  # its worker was removed meanwhile
                return
            if error is not None:
                self._remove(entry)
                self._tell(entry, {"op": "failed", "sandbox": name, **failure_said(error)})
                return
            for each in (self.order(entry), *waiting):
                entry.send(each)

        self.records.opened(owner, name, worker.name, said, entry.expires, written, leased=entry.leased)

    def order(self, entry: Entry) -> Message:
        """Return the message that has a sandbox started, with the uploads that its worker does not have yet."""
        link = entry.worker
        uploads = self.uploads.of(entry.owner, entry.spec, without=link.uploads)
        link.uploads.update(uploads)
        order = {"op": "create", "sandbox": entry.place, "spec": spec_said(entry.spec)}
        return {**order, "uploads": uploads} if uploads else order

    def _start(self, line: ClientLine, entry: Entry, message: Message) -> None:
        """Start a program, a session, or a session's command."""
        name, recorded = message["id"], message["op"] != "shell"
        forward = {**message, "sandbox": entry.place}
        program = entry.programs.get(name)
        if program is not None:
            program.line = line
            if program.waiting is None:
                entry.send({**forward, "again": True} if recorded else forward)
            return
        if recorded:
            cpu_s = message["request"].get("cpu_s")
            self.quotas.check_cpu(entry.owner, cpu_s if isinstance(cpu_s, int | float) else None)
            self.quotas.begin(entry.owner)
        program = entry.programs[name] = Program(line, recorded, [] if recorded else None)
        if not recorded:
            entry.send(forward)
            return
        self._note(line, "run", entry)
        self.counts["programs"] += 1

        def written(error: Exception | None) -> None:
            waiting, program.waiting = program.waiting or [], None
            if error is not None:
                self._over(entry, program)
                if isinstance(error, SandboxDatabaseError):
                    entry.programs.pop(name, None)  # it was never started, so its name may be used again
                else:
                    error = SandboxLostError(str(error))
                if program.line is not None:
                    program.line.deliver({**failure_said(error), "op": "error", **_names(message)})
                return
            for each in (forward, *waiting):
                entry.send(each)

        self.records.started(entry.owner, entry.name, name, written)

    def _pass_on(self, entry: Entry, message: Message) -> None:
        forward = {**message, "sandbox": entry.place}
        most = self.quotas.of(entry.owner).cpu_s
        if message["op"] == "bound" and most is not None:
            forward["cpu_s"] = min(most, message.get("cpu_s") or most)
        program = entry.programs.get(message["id"])
        if program is not None and program.waiting is not None:
            program.waiting.append(forward)
        else:
            entry.send(forward)

    def extend(self, entry: Entry, lifetime_s: float | None) -> None:
        """Set a sandbox's lifetime, counted from now on.

        Raises:
            SandboxQuotaError: it exceeds the owner's quota.
            UnknownSandboxError: the sandbox is being ended.
        """
        if entry.stopping:
            raise UnknownSandboxError(f"the sandbox '{entry.name}' is being ended: it is too late to extend it.")
        entry.ends = time.monotonic() + self.quotas.lifetime_s(entry.owner, lifetime_s, self._lifetime_s)
        self.records.extended(entry.owner, entry.name, entry.expires)

    def stop(self, entry: Entry, *, expired: bool = False) -> None:
        """End a sandbox; its clients are informed once it has ended."""
        entry.stopping = True
        entry.send({"op": "stop", "sandbox": entry.place, "expired": expired})

    def hang_up(self, line: ClientLine) -> None:
        """Remove a client connection that was closed or broke."""
        for entry in self.entries.values():
            entry.looks = {key: asked for key, asked in entry.looks.items() if asked is not line}
            if line in entry.lines:
                entry.lines.discard(line)
                if not entry.lines:
                    entry.alone_since = time.monotonic()
            for program in entry.programs.values():
                if program.line is line:
                    program.line = None

    # --- from workers

    def hear(self, message: Message, worker: WorkerLink | None = None) -> None:
        """Handle a message of a worker about one of its own sandboxes; `None`: the worker is in this process."""
        op = message["op"]
        entry = self.entries.get(message["sandbox"])
        if entry is None or worker not in (None, entry.worker):
            if op == "created" and worker is not None:  # lost or stopped while it started
                worker.send({"op": "stop", "sandbox": message["sandbox"]})
            return
        message = {**message, "sandbox": entry.name}
        program = entry.programs.get(message.get("id", ""))
        look = entry.looks.pop(message.get("id", ""), None)
        if look is not None:
            look.deliver(message)
        elif op == "out" or op == "used":
            if program is not None and program.line is not None:
                program.line.deliver(message)
        elif op in ("end", "error"):
            if program is not None:
                self._ended(entry, program, message)
        elif op == "created":
            entry.traits = message["traits"]
            if entry.state == "starting":
                entry.state = "running"
                self.counts["sandboxes"] += 1
                self.records.running(entry.owner, entry.name)
            self._tell(entry, message)
        elif op in ("gone", "failed"):
            self.gone(entry, message)

    def _ended(self, entry: Entry, program: Program, message: Message) -> None:
        name = message["id"]
        if not program.recorded or program.over:  # a session was opened, or an end is sent again to a new connection
            if program.line is not None and not program.ending:
                program.line.deliver(message)
            return
        self._over(entry, program)
        self.counts["failed" if message["op"] == "error" else "ended"] += 1
        program.ending = True

        def written(error: Exception | None) -> None:
            program.ending = False
            said = message if error is None else {**failure_said(error), "op": "error", **_names(message)}
            if program.line is not None:
                program.line.deliver(said)

        self.records.ended(entry.owner, entry.name, name, message, written)

    def _over(self, entry: Entry, program: Program) -> None:
        if not program.over:
            program.over = True
            if program.recorded:
                self.quotas.end(entry.owner)

    def gone(self, entry: Entry, message: Message) -> None:
        """Remove a sandbox that has ended, or did not start."""
        self._remove(entry)
        kind = str(message.get("error", ""))
        state = "failed" if message["op"] == "failed" else "ended"
        self.counts[f"sandboxes_{kind or state}"] += 1
        said = {**message, "sandbox": entry.name}
        lines = list(entry.lines)

        def written(_: Exception | None) -> None:
            for line in lines:
                line.deliver(said)

        self.records.gone(entry.owner, entry.name, state, kind, written)

    def _tell(self, entry: Entry, message: Message) -> None:
        for line in list(entry.lines):
            line.deliver(message)

    def found(self, entry: Entry, traits: dict[str, Any], known: list[str]) -> None:
        """Resume a sandbox whose worker came back; programs that the worker does not know are lost.

        Messages to the other programs may have been lost with the connection: the client sends them again, and the
        worker skips those it has by their numbers.
        """
        self.hear({"op": "created", "sandbox": entry.place, "traits": traits})
        sent_soon = {message.get("id") for message in entry.worker.waiting}
        for name, program in list(entry.programs.items()):
            if program.recorded and not program.over and program.waiting is None and name not in {*known, *sent_soon}:
                lost = SandboxLostError("the line to the worker broke, and nobody knows what became of the program")
                self.hear({**failure_said(lost), "op": "error", "sandbox": entry.place, "id": name})
        self._tell(entry, {"op": "again", "sandbox": entry.name})

    # --- bookkeeping

    def add(self, entry: Entry) -> None:
        """Add a sandbox."""
        self.entries[entry.place] = entry
        entry.worker.held, entry.worker.placed = entry.worker.held + 1, entry.worker.placed + 1
        entry.worker.held_memory_bytes += entry.spec.limits.memory_bytes

    def _remove(self, entry: Entry) -> None:
        for program in entry.programs.values():
            self._over(entry, program)
        if self.entries.pop(entry.place, None) is not None:
            entry.worker.held -= 1
            entry.worker.held_memory_bytes -= entry.spec.limits.memory_bytes
            self.quotas.give_back(entry.owner, entry.spec)

    def _note(self, line: ClientLine, action: str, entry: Entry) -> None:
        identity = line.identity
        self.audit.note(action, owner=identity.owner, token=identity.token, what=entry.name, peer=line.peer)

    def of(self, owner: str) -> Iterator[Entry]:
        """Return an iterator over an owner's sandboxes."""
        return (entry for entry in list(self.entries.values()) if entry.owner == owner)

    def find(self, owner: str, name: str) -> Entry:
        """Return a sandbox of an owner.

        Raises:
            UnknownSandboxError: the owner has no such sandbox.
        """
        entry = self.entries.get(f"{owner}/{name}")
        if entry is None:
            raise UnknownSandboxError(f"there is no sandbox '{name[:64]}' of '{owner}', or no more.")
        return entry


_UNKNOWN = failure_said(UnknownSandboxError("the sandbox has ended"))


def _names(message: Message) -> dict[str, Any]:
    return {name: message[name] for name in ("sandbox", "id") if name in message}
