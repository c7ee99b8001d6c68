"""Workers that join: checks their names, restores their sandboxes, and drains them.

    join ──► is the name free, or this owner's? ──► agree on the worker's sandboxes ──► heartbeats ──► leave, or timeout

A name belongs to the owner of the token that used it first; only one process at a time can have it. The table `workers`
stores the owner, and whether the worker is draining, so that both survive restarts of the server.
"""

from __future__ import annotations

import time

from roll_sandbox.errors import SandboxAccessError, SandboxRequestError, UnknownSandboxError
from roll_sandbox.service.dispatcher import Dispatcher
from roll_sandbox.service.housekeeper import Housekeeper, list_sandboxes, mark_lost, remove_worker
from roll_sandbox.service.records import RecordStore, WorkerRecord
from roll_sandbox.service.sockets import Channel
from roll_sandbox.service.tokens import Identity
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.wire import Message, report_from_json, validate_worker_message

__all__ = ["LOCAL_NAME", "Workers"]

LOCAL_NAME = "local"
"""Name of the worker in the server's process."""


class Workers:
    """Adds, serves and drains the workers of a service.

    Args:
        dispatcher: the service's dispatcher.
        housekeeper: provides `away_s`, the seconds that a worker may be disconnected.
        records: the records of the service.
    """

    def __init__(self, dispatcher: Dispatcher, housekeeper: Housekeeper, records: RecordStore) -> None:
        self._dispatcher = dispatcher
        self._housekeeper = housekeeper
        self._records = records
        self._known: dict[str, WorkerRecord] = {}

    def recover(self) -> None:
        """Load the records of workers that joined an earlier server."""
        self._known = {row.name: row for row in self._records.load_workers()}

    def add(self, link: WorkerLink) -> None:
        """Add a worker, in this process or on another machine."""
        link.is_drained = (row := self._known.get(link.name)) is not None and bool(row.draining)
        self._dispatcher.workers[link.name] = link

    def join(self, identity: Identity, message: Message, channel: Channel) -> WorkerLink:
        """Add a worker that has sent the message `join`; resume its known sandboxes, and stop unknown sandboxes.

        Raises:
            SandboxRequestError: the message is not a valid `join`, or another process uses the name.
            SandboxAccessError: the name belongs to another owner.
        """
        message = validate_worker_message(message)
        if message["op"] != "join":
            raise SandboxRequestError("the first message of a worker must be 'join'.")
        name, holds, capacity = message["name"], message["holds"], message["capacity"]
        memory_bytes, process, report = (
            message.get("memory_bytes"),
            message["process"],
            report_from_json(message["report"]),
        )
        if name == LOCAL_NAME:
            raise SandboxRequestError(
                "the worker name 'local' is reserved for the server's own worker: choose another (`--name`)."
            )
        if (row := self._known.get(name)) is not None and row.owner != identity.owner:
            raise SandboxAccessError(f"the worker name '{name}' belongs to another owner: choose another (`--name`).")
        dispatcher = self._dispatcher
        link = dispatcher.workers.get(name)
        if link is None:
            self.add(link := WorkerLink(name, None))
        if link.is_connected and link.process != process:
            raise SandboxRequestError(f"another worker is connected as '{name}': choose another name (`--name`).")
        link.mark_disconnected(time.monotonic())
        self._record_worker(name, identity.owner)
        link.capacity, link.memory_bytes, link.process = capacity, memory_bytes, process
        link.is_leaving = bool(message["leaving"])
        # This may be a new process, which does not have the directories that were sent to the earlier process.
        link.uploads.clear()
        link.transmit, link.disconnect = channel.send, channel.close
        self._record_contact(link)
        channel.send({"op": "welcome", "away_s": self._housekeeper.away_s})
        for entry in list_sandboxes(dispatcher, link):
            if entry.qualified_name in holds:
                dispatcher.resume_sandbox(
                    entry, holds[entry.qualified_name]["traits"], holds[entry.qualified_name]["programs"]
                )
                if entry.is_stopping:
                    channel.send({"op": "stop", "sandbox": entry.qualified_name})
            elif entry.state == "running":
                mark_lost(dispatcher, entry, f"its worker '{name}' reconnected without it")
            elif entry.queued is None:
                channel.send(dispatcher.make_create_message(entry))
                if entry.is_stopping:
                    channel.send({"op": "stop", "sandbox": entry.qualified_name})
        for qualified_name in holds:
            if qualified_name not in dispatcher.entries or dispatcher.entries[qualified_name].worker is not link:
                channel.send({"op": "stop", "sandbox": qualified_name})
        # Queued messages are sent after `create` and `resume`, since they are for these sandboxes.
        waiting, link.queued, link.queued_bytes = link.queued, [], 0
        for each in waiting:
            channel.send(each)
        link.update_report(report)
        return link

    def on_message(self, link: WorkerLink, message: Message, channel: Channel) -> None:
        """Handle a message from a worker that has joined."""
        if link.transmit != channel.send:  # the worker has joined again over another connection
            return
        message = validate_worker_message(message)
        self._record_contact(link)
        op = message["op"]
        if op == "beat":
            link.is_leaving = bool(message["leaving"])
            link.update_report(report_from_json(message["report"]))
            channel.send({"op": "beat"})
        elif op == "leave":
            link.mark_disconnected(time.monotonic())
            remove_worker(self._dispatcher, link)
        else:
            self._dispatcher.on_worker_message(message, link)

    def _record_contact(self, link: WorkerLink) -> None:
        link.last_message_at, link.last_seen = time.monotonic(), time.time()

    def drain(self, name: str, *, draining: bool) -> WorkerLink:
        """Set whether a worker is draining. A draining worker gets no new sandboxes, but its current sandboxes keep
        running.

        Raises:
            UnknownSandboxError: no worker has this name.
        """
        link = self._dispatcher.workers.get(name)
        if link is None:
            raise UnknownSandboxError(f"unknown worker '{name}': `roll-sandbox workers` lists the workers.")
        link.is_drained = draining
        self._record_worker(name, self._known[name].owner if name in self._known else LOCAL_NAME)
        return link

    def _record_worker(self, name: str, owner: str) -> None:
        row = WorkerRecord(name, owner, time.time(), int(self._dispatcher.workers[name].is_drained))
        self._records.record_worker(row, exists=name in self._known)
        self._known[name] = row
