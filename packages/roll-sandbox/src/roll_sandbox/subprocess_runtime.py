"""The `subprocess` runtime, which has no isolation: for development with trusted code on machines without bubblewrap.

Programs run as this user, and can do everything that this user can. The agent enforces limits on time, output, memory
and processes, as protection against accidents, not against attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from typing import Any

from roll_sandbox.agent_code import get_agent_source
from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.connection import AgentConnection
from roll_sandbox.counters import Counters
from roll_sandbox.errors import SandboxError, UntrustedCodeError
from roll_sandbox.requests import make_agent_settings
from roll_sandbox.system_plan import find_interpreter
from roll_sandbox.types import SandboxSpec

__all__ = ["SubprocessRuntime"]

_PREFIX = "roll-unsafe-sandbox-"


class SubprocessRuntime:
    """Runs every sandbox as a subprocess without isolation; see `runtime.Runtime`."""

    name = "subprocess"
    fresh_programs = False

    def __init__(self) -> None:
        self._watch_tasks: set[asyncio.Task[None]] = set()
        self._sandboxes: set[Sandbox] = set()

    async def start(self) -> None:
        """Do nothing, because the runtime works on every machine."""

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec unchanged: the runtime has no images."""
        return spec

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start an agent in a new directory, and return it as a sandbox.

        Raises:
            UntrustedCodeError: the spec is not marked as trusted, or needs mounts or an image.
        """
        if spec.trust != "trusted":
            raise UntrustedCodeError(
                "the subprocess runtime has no isolation and must not run untrusted code. Use the bubblewrap or docker "
                "runtime, or set SandboxSpec(trust='trusted') for code that you wrote yourself."
            )
        if spec.mounts or spec.image:
            raise UntrustedCodeError(
                "the subprocess runtime does not support mounts and images: use the bubblewrap or docker runtime."
            )
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        ours, theirs = socket.socketpair()
        with theirs:
            # In a thread: forking a large process takes long, and would block the loop.
            process = await asyncio.to_thread(
                subprocess.Popen,
                [str(find_interpreter()), "-SsPB", "-c", get_agent_source()],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = asyncio.create_task(self._wait_and_clean_up(process, directory, ended))
        self._watch_tasks.add(watch)
        watch.add_done_callback(self._watch_tasks.discard)
        env = {"PATH": f"{find_interpreter().parent}:{os.environ.get('PATH', os.defpath)}", "HOME": directory}
        settings = make_agent_settings(
            spec,
            home=directory,
            env={**env, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "TMPDIR": directory},
            isolated=False,
            mount_space=False,
            has_own_cgroup=False,
            counts_cpu=False,
            filter=b"",
            limit_processes=False,
            limit_address_space=True,
            watch_memory=True,
        )
        connection = AgentConnection(lambda: "the agent ended unexpectedly")
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        sandbox = Sandbox(spec, settings, connection, destroy=lambda: None, ended=ended, counters=Counters())
        self._sandboxes.add(sandbox)
        sandbox.on_close(lambda: self._sandboxes.discard(sandbox))
        return sandbox

    async def _wait_and_clean_up(
        self, process: subprocess.Popen[Any], directory: str, ended: asyncio.Future[None]
    ) -> None:
        """Wait until the agent has ended, kill the processes left in its process group, and remove its directory.

        The agent ends when its connection closes.
        """
        try:
            await asyncio.to_thread(process.wait)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            shutil.rmtree(directory, ignore_errors=True)
            if not ended.done():
                ended.set_result(None)

    async def close(self) -> None:
        """End every sandbox."""
        for sandbox in list(self._sandboxes):
            with contextlib.suppress(SandboxError):
                await sandbox.close()
        await asyncio.gather(*self._watch_tasks, return_exceptions=True)
