"""Workers that join: their names, the sandboxes they hold, and whether they are draining.

    join ──► name free, or this owner's? ──► agree on held sandboxes ──► heartbeats ──► leave, or silence (`keeper.py`)

A name belongs to the owner of the token that used it first, and to one process at a time. The table `workers` keeps the
owner, and whether the worker is draining, across restarts of the server.
"""

from __future__ import annotations

import time

from roll_sandbox.errors import SandboxAccessError, SandboxRequestError, UnknownSandboxError
from roll_sandbox.service.keeper import Keeper, give_up, held, lose
from roll_sandbox.service.links import WorkerLink
from roll_sandbox.service.records import Records, WorkerRecord
from roll_sandbox.service.sockets import Channel
from roll_sandbox.service.switchboard import Switchboard
from roll_sandbox.service.tokens import Identity
from roll_sandbox.wire import Message, heard, report_of

__all__ = ["LOCAL", "Workers"]

LOCAL = "local"
"""The worker in the server's process."""


class Workers:
    """The workers of a service; see the module.

    Args:
        board: the switchboard.
        keeper: defines how long a worker may be away.
        records: the records of the service.
    """

    def __init__(self, board: Switchboard, keeper: Keeper, records: Records) -> None:
        self._board = board
        self._keeper = keeper
        self._records = records
        self._known: dict[str, WorkerRecord] = {}

    def recover(self) -> None:
        """Load the workers that earlier servers knew."""
        self._known = {row.name: row for row in self._records.workers()}

    def add(self, link: WorkerLink) -> None:
        """Add a worker that is in this process, or joins."""
        link.drained = (row := self._known.get(link.name)) is not None and bool(row.draining)
        self._board.workers[link.name] = link

    def join(self, identity: Identity, message: Message, channel: Channel) -> WorkerLink:
        """Join a worker, and agree with it on the sandboxes that it holds.

        Raises:
            SandboxRequestError: the message is not a valid `join`, or another process has the name.
            SandboxAccessError: the name is another owner's.
        """
        message = heard(message)
        if message["op"] != "join":
            raise SandboxRequestError("a worker says first who it is.")
        name, holds, capacity = message["name"], message["holds"], message["capacity"]
        memory_bytes, process, report = message.get("memory_bytes"), message["process"], report_of(message["report"])
        if name == LOCAL:
            raise SandboxRequestError("a worker needs a name of its own (`--name`).")
        if (row := self._known.get(name)) is not None and row.owner != identity.owner:
            raise SandboxAccessError(f"the name '{name}' is that of another owner's worker: choose another (`--name`).")
        board = self._board
        link = board.workers.get(name)
        if link is None:
            self.add(link := WorkerLink(name, None))
        if link.here and link.process != process:
            raise SandboxRequestError(f"another worker is connected as '{name}': choose another name (`--name`).")
        link.away(time.monotonic())
        self._write(name, identity.owner)
        link.capacity, link.memory_bytes, link.process = capacity, memory_bytes, process
        link.leaving = bool(message["leaving"])
        link.uploads.clear()
        link.transmit, link.hang_up = channel.send, channel.close
        self._heard(link)
        channel.send({"op": "welcome", "away_s": self._keeper.away_s})
        for entry in held(board, link):
            if entry.place in holds:
                board.found(entry, holds[entry.place]["traits"], holds[entry.place]["programs"])
                if entry.stopping:
                    channel.send({"op": "stop", "sandbox": entry.place})
            elif entry.state == "running":
                lose(board, entry, f"its worker '{name}' came back without it")
            elif entry.waiting is None:
                channel.send(board.order(entry))
                if entry.stopping:
                    channel.send({"op": "stop", "sandbox": entry.place})
        for place in holds:
            if place not in board.entries or board.entries[place].worker is not link:
                channel.send({"op": "stop", "sandbox": place})
        waiting, link.waiting, link.waiting_bytes = link.waiting, [], 0
        for each in waiting:
            channel.send(each)
        link.note(report)
        return link

    def hear(self, link: WorkerLink, message: Message, channel: Channel) -> None:
        """Handle a message of a worker that has joined."""
        if link.transmit != channel.send:  # the worker has joined again since
            return
        message = heard(message)
        self._heard(link)
        op = message["op"]
        if op == "beat":
            link.leaving = bool(message["leaving"])
            link.note(report_of(message["report"]))
            channel.send({"op": "beat"})
        elif op == "leave":
            link.away(time.monotonic())
            give_up(self._board, link)
        else:
            self._board.hear(message, link)

    def _heard(self, link: WorkerLink) -> None:
        link.heard, link.seen = time.monotonic(), time.time()

    def drain(self, name: str, *, draining: bool) -> WorkerLink:
        """Set whether a worker is draining, so that it gets no new sandboxes; its present ones go on.

        Raises:
            UnknownSandboxError: there is no such worker.
        """
        link = self._board.workers.get(name)
        if link is None:
            raise UnknownSandboxError(f"there is no worker '{name}': `roll-sandbox workers` lists them.")
        link.drained = draining
        self._write(name, self._known[name].owner if name in self._known else LOCAL)
        return link

    def _write(self, name: str, owner: str) -> None:
        row = WorkerRecord(name, owner, time.time(), int(self._board.workers[name].drained))
        self._records.worker(row, known=name in self._known)
        self._known[name] = row
