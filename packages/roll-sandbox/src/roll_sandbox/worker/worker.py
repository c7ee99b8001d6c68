"""A worker: sandboxes of one machine by name, controlled by a server.

Invariants: one event loop; a name is one sandbox, also if it is requested again; the end of a sandbox is reported to
the server once; `close` leaves no sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.errors import (
    RollSandboxError,
    SandboxError,
    SandboxExpiredError,
    SandboxLostError,
    SandboxRequestError,
    UnknownSandboxError,
)
from roll_sandbox.machine import CpuMeter, count_cores, read_memory_bytes
from roll_sandbox.manager import SandboxManager
from roll_sandbox.types import Mount, SandboxSpec
from roll_sandbox.uploads import WrittenUploads
from roll_sandbox.wire import MAX_POOLS, Message, Report, error_to_json, spec_from_json
from roll_sandbox.worker.executions import Executions
from roll_sandbox.worker.outputs import Outputs

__all__ = ["Worker"]


_log = logging.getLogger(__name__)


class _HeldSandbox:
    def __init__(self, sandbox: Sandbox, executions: Executions) -> None:
        self.sandbox = sandbox
        self.executions = executions


class Worker:
    """The sandboxes of one machine; see the module.

    Args:
        manager: starts the sandboxes; started and closed by the caller.
        mounts: directories of this machine; specs may mount anything below them.
        send: sends a message to the server, without waiting.
        images: returns names and digests of the images that this machine has.
    """

    def __init__(
        self,
        manager: SandboxManager,
        *,
        mounts: Sequence[str] = (),
        send: Callable[[Message], None] | None = None,
        images: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._manager = manager
        self._mounts = [os.path.realpath(path) for path in mounts]
        self._send = send
        self._images = images
        self._cpu = CpuMeter()
        self._outputs = Outputs()
        self._uploads = WrittenUploads()
        self._held: dict[str, _HeldSandbox] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}

    def send(self, message: Message) -> None:
        """Send a message to the server. Without a server it is dropped: a new one requests what it missed."""
        if self._send is not None:
            self._send(message)

    def set_sender(self, send: Callable[[Message], None] | None) -> None:
        """Set the function that sends messages to the server; `None`: there is no server."""
        self._send = send

    def receive(self, message: Message) -> None:
        """Handle a message of the server in the format of `wire.messages`, which the server has checked."""
        op, place = message["op"], message["sandbox"]
        held = self._held.get(place)
        if op == "create":
            self._create(place, message)
        elif op == "stop":
            self._stop(place, held, message.get("expired", False))
        elif held is None:
            if place not in self._starting:
                error = error_to_json(UnknownSandboxError("the sandbox has ended"))
                named = {"sandbox": place, "id": message["id"]} if "id" in message else {"sandbox": place}
                self.send({**error, "op": "error" if "id" in message else "gone", **named})
        elif op == "attach":
            self._send_created(place, held)
        else:
            held.executions.receive(message)

    def _create(self, place: str, message: Message) -> None:
        held = self._held.get(place)
        if held is not None:
            self._send_created(place, held)
        elif place not in self._starting:
            task = self._starting[place] = asyncio.create_task(self._launch(place, message))
            task.add_done_callback(lambda task: self._on_launched(place, task))

    def _on_launched(self, place: str, task: asyncio.Task[None]) -> None:
        self._starting.pop(place, None)
        if task.cancelled():  # perhaps before it ran at all
            self.send(
                {
                    "op": "gone",
                    "sandbox": place,
                    **error_to_json(SandboxLostError("the sandbox was stopped before it started")),
                }
            )
        elif (error := task.exception()) is not None:
            _log.error("a sandbox did not start", exc_info=error)
            broken = SandboxError(f"the sandbox did not start: {error!r}")
            self.send({"op": "failed", "sandbox": place, **error_to_json(broken)})

    async def _launch(self, place: str, message: Message) -> None:
        try:
            for digest, files in message.get("uploads", {}).items():
                self._uploads.add(digest, files)
            spec = self._check_mounts(spec_from_json(message["spec"]))
            sandbox = await self._manager.create(spec)
        except (RollSandboxError, ValueError) as error:
            self.send({"op": "failed", "sandbox": place, **error_to_json(error)})
            return
        held = self._held[place] = _HeldSandbox(sandbox, Executions(place, sandbox, self.send, self._outputs))
        sandbox.on_close(lambda: self._on_sandbox_ended(place, held))
        self._send_created(place, held)

    def _check_mounts(self, spec: SandboxSpec) -> SandboxSpec:
        """Check a spec's mounts, and return the spec as this machine starts it.

        The pool is dropped, since the sandbox is never used again.
        """
        mounts = []
        for mount in spec.mounts:
            if (uploaded := self._uploads.resolve_mount(mount)) is not None:
                mounts.append(uploaded)
                continue
            source = os.path.realpath(mount.source)
            if not any(source == path or source.startswith(path.rstrip("/") + "/") for path in self._mounts):
                raise SandboxRequestError(
                    f"a mount of '{mount.source}' is not permitted on this worker: start the worker with "
                    f"`--mounts {mount.source}`, or upload the directory."
                )
            mounts.append(Mount(source=source, target=mount.target))
        return dataclasses.replace(spec, pool="", mounts=tuple(mounts))

    def _send_created(self, place: str, held: _HeldSandbox) -> None:
        self.send({"op": "created", "sandbox": place, "traits": held.sandbox.properties})

    def _stop(self, place: str, held: _HeldSandbox | None, expired: bool) -> None:
        if held is not None:
            held.executions.end_reason = held.executions.end_reason or (
                SandboxExpiredError(
                    "the sandbox reached the end of its lifetime: extend it, or request a longer lifetime"
                )
                if expired
                else UnknownSandboxError("the sandbox was stopped")
            )
            held.sandbox.destroy()
        elif place in self._starting:
            self._starting[place].cancel()
        else:
            self.send({"op": "gone", "sandbox": place, **error_to_json(UnknownSandboxError("the sandbox has ended"))})

    def _on_sandbox_ended(self, place: str, held: _HeldSandbox) -> None:
        self._held.pop(place, None)
        held.executions.forget()
        why = held.executions.end_reason or SandboxLostError("the sandbox ended unexpectedly")
        self.send({"op": "gone", "sandbox": place, **error_to_json(why)})

    def inventory(self) -> dict[str, Message]:
        """Return every sandbox here, with its programs whose end is not forgotten."""
        return {
            place: {"traits": held.sandbox.properties, "programs": held.executions.list_names()}
            for place, held in self._held.items()
        }

    def list_unacked_ends(self) -> list[Message]:
        """Return the ends of programs that a server may not have received."""
        return [message for held in self._held.values() for message in held.executions.list_unacked_ends()]

    @property
    def is_empty(self) -> bool:
        """Whether no sandbox runs or starts."""
        return not self._held and not self._starting

    def report(self) -> Report:
        """Return the report on this machine, for the placement of sandboxes."""
        free_bytes, all_bytes = read_memory_bytes() or (None, None)
        return Report(
            cores=count_cores(),
            busy=self._cpu.measure_busy_share(),
            memory_bytes=all_bytes,
            free_bytes=free_bytes,
            images=tuple(self._images()),
            pools=tuple(self._manager.pools()[-MAX_POOLS:]),
        )

    async def close(self) -> None:
        """End every sandbox."""
        for task in list(self._starting.values()):
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        for held in list(self._held.values()):
            with contextlib.suppress(RollSandboxError):
                await held.sandbox.close()
        self._uploads.close()
