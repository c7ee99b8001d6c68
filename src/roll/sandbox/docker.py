"""The `docker` runtime: one container per sandbox, through the Docker SDK. Brings images.

The image must have Python 3.9 or newer as `python3`, and bash for sessions. The container has no network, no
capabilities, a read-only system, limits on memory and processes, and Docker's own system-call filter below ours. The
agent shares it with the programs (as its first process, unreachable for them); a program gets no namespaces of its
own, so every program gets a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import socket
import uuid
from typing import TYPE_CHECKING, Any

from roll.sandbox.agent_code import agent_source
from roll.sandbox.agent_sandbox import AgentSandbox, agent_settings
from roll.sandbox.connection import AgentConnection
from roll.sandbox.counters import Counters
from roll.sandbox.errors import SandboxError, SandboxUnavailableError
from roll.sandbox.seccomp import SUPPORTED, seccomp_filter
from roll.sandbox.system_plan import HOME
from roll.sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

__all__ = ["DEFAULT_IMAGE", "DockerRuntime"]

DEFAULT_IMAGE = "python:3.11-slim"
LABEL = "roll.sandbox"
_OVERHEAD_BYTES = 32 * 2**20
_OVERHEAD_PROCESSES = 4
_USER = "1000:1000"


class DockerRuntime:
    """See the module and `protocols.Runtime`."""

    name = "docker"
    fresh_programs = False

    def __init__(self, *, default_image: str = DEFAULT_IMAGE) -> None:
        self._default_image = default_image
        self._client: DockerClient | None = None
        self._label = uuid.uuid4().hex
        self._sandboxes: set[AgentSandbox] = set()

    async def start(self) -> None:
        """Reach the engine."""
        if self._client is None:
            self._client = await asyncio.to_thread(_connect)

    async def launch(self, spec: SandboxSpec) -> AgentSandbox:
        """Start a container."""
        if self._client is None:
            raise SandboxError("the docker runtime was not started, or is closed")
        container, line = await asyncio.to_thread(self._start_container, self._client, spec)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        removal: list[asyncio.Task[None]] = []

        def destroy() -> None:
            if not removal:
                removal.append(loop.create_task(_remove(container, ended)))

        settings = agent_settings(
            spec,
            home=HOME,
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": HOME,
                "LANG": "C.UTF-8",
            },
            isolated=True,
            mount_space=False,
            own_group=True,
            filter=seccomp_filter() if platform.machine() in SUPPORTED else b"",
            bound_processes=False,
            bound_address_space=False,
            watch_memory=True,
        )
        connection = _DockerConnection(lambda: "the container ended unexpectedly")
        await loop.create_unix_connection(lambda: connection, sock=line)
        sandbox = AgentSandbox(spec, settings, connection, destroy=destroy, ended=ended, counters=Counters())
        self._sandboxes.add(sandbox)
        sandbox.on_close(lambda: self._sandboxes.discard(sandbox))
        return sandbox

    def _start_container(self, client: DockerClient, spec: SandboxSpec) -> tuple[Container, socket.socket]:
        import docker.errors
        import docker.types

        limits = spec.limits
        memory = limits.memory_bytes + _OVERHEAD_BYTES
        space = f"rw,nosuid,nodev,size={limits.disk_bytes},nr_inodes={limits.max_files}"
        try:
            container = client.containers.create(
                spec.image or self._default_image,
                ["python3", "-SsB", "-c", agent_source()],
                stdin_open=True,
                network_mode="none",
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                pids_limit=limits.max_processes + _OVERHEAD_PROCESSES,
                mem_limit=memory,
                memswap_limit=memory,
                user=_USER,
                hostname="sandbox",
                environment={"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
                tmpfs={HOME: f"{space},uid=1000,gid=1000,mode=755", "/tmp": f"{space},mode=1777"},
                volumes={mount.source: {"bind": mount.target, "mode": "ro"} for mount in spec.mounts},
                shm_size=limits.disk_bytes,
                labels={LABEL: self._label},
                auto_remove=True,
                ipc_mode="private",
                log_config=docker.types.LogConfig(type="none"),
            )
            line = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 0, "stream": 1})
            container.start()
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxError(f"docker does not start a container: {error}") from error
        raw: Any = getattr(line, "_sock", line)
        duplicate = raw.dup()
        line.close()
        return container, duplicate

    async def close(self) -> None:
        """End every container."""
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)


def _connect() -> DockerClient:
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailableError(
            "the docker runtime needs the Docker SDK: pip install 'roll[docker]' (or choose the bubblewrap runtime)."
        ) from error
    try:
        client = docker.from_env()
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxUnavailableError(
            f"no Docker engine answers ({error}). Start it, set DOCKER_HOST, or choose the bubblewrap runtime."
        ) from error
    return client


async def _remove(container: Container, ended: asyncio.Future[None]) -> None:
    import docker.errors

    with contextlib.suppress(docker.errors.DockerException, OSError):  # gone already: its agent left first
        await asyncio.to_thread(container.remove, force=True)
    if not ended.done():
        ended.set_result(None)


class _DockerConnection(AgentConnection):
    """Docker wraps what the agent writes: stream(1) zeros(3) length(4, big-endian) data."""

    def __init__(self, on_lost: Any) -> None:
        super().__init__(on_lost)
        self._wrapped = bytearray()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._wrapped += data
        start = 0
        while len(self._wrapped) - start >= 8:
            end = start + 8 + int.from_bytes(self._wrapped[start + 4 : start + 8], "big")
            if len(self._wrapped) < end:
                break
            super().data_received(bytes(self._wrapped[start + 8 : end]))
            start = end
        del self._wrapped[:start]
