"""A worker: runs sandboxes on one machine, on request of a server.

Invariants:
    - everything runs in one event loop;
    - a name identifies one sandbox, even if its creation is requested again;
    - the end of a sandbox is reported to the server once;
    - `close` leaves no sandbox.
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
from roll_sandbox.uploads import UploadDirectories
from roll_sandbox.wire import MAX_POOLS, Message, WorkerReport, error_to_json, spec_from_json
from roll_sandbox.worker.executions import ProgramRunner
from roll_sandbox.worker.outputs import OutputBudget

__all__ = ["Worker"]


_log = logging.getLogger(__name__)


class _RunningSandbox:
    """A sandbox that has started, and the programs in it."""

    def __init__(self, sandbox: Sandbox, executions: ProgramRunner) -> None:
        self.sandbox = sandbox
        self.executions = executions


class Worker:
    """Starts, runs and stops sandboxes on one machine.

    Args:
        manager: manager that starts the sandboxes; the caller starts and closes it.
        mounts: directories of this machine; specs may mount them and everything below them.
        send: function that sends a message to the server, without waiting.
        images: function that returns the names and digests of this machine's images.
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
        self._outputs = OutputBudget()
        self._uploads = UploadDirectories()
        self._held: dict[str, _RunningSandbox] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}

    def send(self, message: Message) -> None:
        """Send a message to the server. Without a connection, drop it; clients request missed messages later."""
        if self._send is not None:
            self._send(message)

    def set_sender(self, send: Callable[[Message], None] | None) -> None:
        """Set the function that sends messages to the server; `None` if there is no connection."""
        self._send = send

    def receive(self, message: Message) -> None:
        """Handle a message from the server, which has validated its format (`wire.client_messages`)."""
        op, qualified_name = message["op"], message["sandbox"]
        running = self._held.get(qualified_name)
        if op == "create":
            self._create_sandbox(qualified_name, message)
        elif op == "stop":
            self._stop_sandbox(qualified_name, running, message.get("expired", False))
        elif running is None:
            if qualified_name not in self._starting:
                error = error_to_json(UnknownSandboxError("the sandbox has ended"))
                named = (
                    {"sandbox": qualified_name, "id": message["id"]} if "id" in message else {"sandbox": qualified_name}
                )
                self.send({**error, "op": "error" if "id" in message else "gone", **named})
        elif op == "attach":
            self._send_created(qualified_name, running)
        else:
            running.executions.receive(message)

    def _create_sandbox(self, qualified_name: str, message: Message) -> None:
        running = self._held.get(qualified_name)
        if running is not None:
            self._send_created(qualified_name, running)
        elif qualified_name not in self._starting:
            task = self._starting[qualified_name] = asyncio.create_task(self._launch_sandbox(qualified_name, message))
            task.add_done_callback(lambda task: self._on_launched(qualified_name, task))

    def _on_launched(self, qualified_name: str, task: asyncio.Task[None]) -> None:
        self._starting.pop(qualified_name, None)
        if task.cancelled():  # possibly before it ran at all
            self.send(
                {
                    "op": "gone",
                    "sandbox": qualified_name,
                    **error_to_json(SandboxLostError("the sandbox was stopped before it started")),
                }
            )
        elif (error := task.exception()) is not None:
            _log.error("a sandbox failed to start", exc_info=error)
            broken = SandboxError(f"the sandbox failed to start: {error!r}")
            self.send({"op": "failed", "sandbox": qualified_name, **error_to_json(broken)})

    async def _launch_sandbox(self, qualified_name: str, message: Message) -> None:
        try:
            for digest, files in message.get("uploads", {}).items():
                self._uploads.add(digest, files)
            spec = self._check_mounts(spec_from_json(message["spec"]))
            sandbox = await self._manager.create(spec)
        except (RollSandboxError, ValueError) as error:
            self.send({"op": "failed", "sandbox": qualified_name, **error_to_json(error)})
            return
        running = self._held[qualified_name] = _RunningSandbox(
            sandbox, ProgramRunner(qualified_name, sandbox, self.send, self._outputs)
        )
        sandbox.on_close(lambda: self._on_sandbox_ended(qualified_name, running))
        self._send_created(qualified_name, running)

    def _check_mounts(self, spec: SandboxSpec) -> SandboxSpec:
        """Check the mounts of a spec, and return the spec with the mounts resolved on this machine.

        The field `pool` of the spec is cleared, since the sandbox is never reused.
        """
        mounts = []
        for mount in spec.mounts:
            if (uploaded := self._uploads.resolve_mount(mount)) is not None:
                mounts.append(uploaded)
                continue
            # Links are resolved before the comparison: a link below a permitted directory may lead out of it.
            source = os.path.realpath(mount.source)
            if not any(source == path or source.startswith(path.rstrip("/") + "/") for path in self._mounts):
                raise SandboxRequestError(
                    f"a mount of '{mount.source}' is not permitted on this worker: start the worker with "
                    f"`--mounts {mount.source}`, or upload the directory."
                )
            mounts.append(Mount(source=source, target=mount.target))
        return dataclasses.replace(spec, pool="", mounts=tuple(mounts))

    def _send_created(self, qualified_name: str, running: _RunningSandbox) -> None:
        self.send({"op": "created", "sandbox": qualified_name, "traits": running.sandbox.properties})

    def _stop_sandbox(self, qualified_name: str, running: _RunningSandbox | None, expired: bool) -> None:
        if running is not None:
            running.executions.end_reason = running.executions.end_reason or (
                SandboxExpiredError(
                    "the sandbox reached the end of its lifetime: extend it, or request a longer lifetime"
                )
                if expired
                else UnknownSandboxError("the sandbox was stopped")
            )
            running.sandbox.destroy()
        elif qualified_name in self._starting:
            self._starting[qualified_name].cancel()
        else:
            self.send(
                {"op": "gone", "sandbox": qualified_name, **error_to_json(UnknownSandboxError("the sandbox has ended"))}
            )

    def _on_sandbox_ended(self, qualified_name: str, running: _RunningSandbox) -> None:
        self._held.pop(qualified_name, None)
        running.executions.release_outputs()
        error = running.executions.end_reason or SandboxLostError("the sandbox ended unexpectedly")
        self.send({"op": "gone", "sandbox": qualified_name, **error_to_json(error)})

    def list_sandboxes(self) -> dict[str, Message]:
        """Return, by name, the traits of each sandbox of this worker, and the names of its known programs."""
        return {
            qualified_name: {"traits": running.sandbox.properties, "programs": running.executions.list_names()}
            for qualified_name, running in self._held.items()
        }

    def list_unacked_ends(self) -> list[Message]:
        """Return the end messages of programs that a server may not have received."""
        return [message for running in self._held.values() for message in running.executions.list_unacked_ends()]

    @property
    def is_empty(self) -> bool:
        """True if no sandbox is running or starting."""
        return not self._held and not self._starting

    def make_report(self) -> WorkerReport:
        """Return the report about this machine, which the server uses to place sandboxes."""
        free_bytes, all_bytes = read_memory_bytes() or (None, None)
        return WorkerReport(
            cores=count_cores(),
            busy=self._cpu.measure_cpu_utilization(),
            memory_bytes=all_bytes,
            free_bytes=free_bytes,
            images=tuple(self._images()),
            pools=tuple(self._manager.pools()[-MAX_POOLS:]),
        )

    async def close(self) -> None:
        """End every sandbox."""
        # Cancel starts first: a start that succeeds in spite of the cancellation adds its sandbox to `_held`.
        for task in list(self._starting.values()):
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        for running in list(self._held.values()):
            with contextlib.suppress(RollSandboxError):
                await running.sandbox.close()
        self._uploads.close()
