"""The `docker` runtime: one container per sandbox, through the Docker SDK, with Docker images.

The image must have Python 3.9 or newer as `python3`, and bash for sessions. The container has no network, no
capabilities, a read-only system, limits on memory and processes, and Docker's system-call filter in addition to this
package's. The agent is the container's first process, which programs cannot reach; a program gets no namespaces of its
own, so every program gets a container.

    launch ──► engine: create, attach, start ──► connection to the agent: the container's stdin and stdout
    close, or the end of this process ──► the connection closes ──► the agent ends ──► the engine removes the container

Invariants: a container that was created is removed, whether it started or not, and also if its caller was canceled;
`close` leaves no container with this runtime's label. A container that a killed process had created and not yet
started, which uses only a name, is removed at the start of the next runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any

from roll_sandbox.agent_code import agent_source
from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.connection import AgentConnection
from roll_sandbox.counters import Counters
from roll_sandbox.errors import SandboxError, SandboxUnavailableError
from roll_sandbox.requests import make_agent_settings
from roll_sandbox.seccomp import SUPPORTED, seccomp_filter
from roll_sandbox.system_plan import HOME
from roll_sandbox.types import Limit, SandboxSpec
from roll_sandbox.version import install_extra

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

__all__ = ["DEFAULT_IMAGE", "DockerRuntime"]

_log = logging.getLogger(__name__)

DEFAULT_IMAGE = "python:3.11-slim"
LABEL = "roll_sandbox"
STALE_AFTER_S = 600.0
"""Age at which a container that has not started is removed."""
_OVERHEAD_BYTES = 32 * 2**20
_OVERHEAD_PROCESSES = 4
_USER = "1000:1000"


class DockerRuntime:
    """The docker runtime; see the module and `runtime.Runtime`."""

    name = "docker"
    fresh_programs = False

    def __init__(self, *, default_image: str = DEFAULT_IMAGE) -> None:
        self._default_image = default_image
        self._client: DockerClient | None = None
        self._label = uuid.uuid4().hex
        self._sandboxes: set[Sandbox] = set()
        self._filter = b""

    async def start(self) -> None:
        """Connect to the engine."""
        if self._client is None:
            self._client, machine = await asyncio.to_thread(_connect)
            await asyncio.to_thread(_remove_stale_containers, self._client)
            if machine in SUPPORTED:
                self._filter = seccomp_filter(machine)
            else:
                _log.warning("no system-call filter for '%s' exists: only the engine's own filter applies", machine)

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec as it is: image names are resolved by the engine."""
        return spec

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a container.

        Raises:
            SandboxUnavailableError: the image or a mount does not exist, or the image has no Python.
        """
        if self._client is None:
            raise SandboxError("the docker runtime was not started, or is closed")
        since = int(time.time())
        starting = asyncio.ensure_future(asyncio.to_thread(self._start_container, self._client, spec))
        try:
            container, line = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close_abandoned)
            raise
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        removal: list[asyncio.Task[None]] = []

        def destroy() -> None:
            if not removal:
                removal.append(loop.create_task(_remove(container, ended)))

        async def on_agent_lost() -> set[Limit]:
            return await asyncio.to_thread(_query_oom, self._client, container, since)

        settings = make_agent_settings(
            spec,
            home=HOME,
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": HOME,
                "LANG": "C.UTF-8",
            },
            isolated=True,
            mount_space=False,
            has_own_cgroup=True,
            counts_cpu=False,
            filter=self._filter,
            limit_processes=False,
            limit_address_space=False,
            watch_memory=True,
        )
        connection = _DockerConnection(lambda: "the container ended unexpectedly")
        await loop.create_connection(lambda: connection, sock=line)
        sandbox = Sandbox(
            spec, settings, connection, destroy=destroy, ended=ended, counters=Counters(), on_agent_lost=on_agent_lost
        )
        self._sandboxes.add(sandbox)
        sandbox.on_close(lambda: self._sandboxes.discard(sandbox))
        return sandbox

    def _start_container(self, client: DockerClient, spec: SandboxSpec) -> tuple[Container, socket.socket]:
        import docker.errors

        image = spec.image or self._default_image
        container = None
        try:
            container = client.containers.create(
                image,
                ["python3", "-SsB", "-c", agent_source()],
                **_container_settings(spec),
                labels={LABEL: self._label},
            )
            line = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 0, "stream": 1})
            own = _detach_socket(line)
            container.start()
        except BaseException as error:
            if container is not None:
                _remove_now(container)
            if isinstance(error, (docker.errors.DockerException, OSError)):
                raise _explain_start_error(error, image, spec) from error
            raise
        return container, own

    async def close(self) -> None:
        """End every container."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(self._remove_leftovers, client)
            await asyncio.to_thread(client.close)

    def _remove_leftovers(self, client: DockerClient) -> None:
        """Remove containers whose start was canceled."""
        import docker.errors

        with contextlib.suppress(docker.errors.DockerException, OSError):  # the engine is gone, with its containers
            for container in client.containers.list(
                all=True, filters={"label": f"{LABEL}={self._label}"}, ignore_removed=True
            ):
                _remove_now(container)


def _container_settings(spec: SandboxSpec) -> dict[str, Any]:
    """Return the settings of the container."""
    import docker.types

    limits = spec.limits
    memory = limits.memory_bytes + _OVERHEAD_BYTES
    space = f"rw,nosuid,nodev,size={limits.disk_bytes},nr_inodes={limits.max_files}"
    return {
        "stdin_open": True,
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": limits.max_processes + _OVERHEAD_PROCESSES,
        "mem_limit": memory,
        "memswap_limit": memory,
        "user": _USER,
        "hostname": "sandbox",
        "environment": {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
        "tmpfs": {HOME: f"{space},uid=1000,gid=1000,mode=755", "/tmp": f"{space},mode=1777"},
        "mounts": [
            docker.types.Mount(type="bind", source=mount.source, target=mount.target, read_only=True)
            for mount in spec.mounts
        ],
        "shm_size": limits.disk_bytes,
        "auto_remove": True,
        "ipc_mode": "private",
        "log_config": docker.types.LogConfig(type="none"),
    }


def _detach_socket(line: Any) -> socket.socket:
    """Duplicate the connection to the engine into a plain socket, and close the original."""
    raw: Any = getattr(line, "_sock", line)
    if not isinstance(raw, socket.socket) or isinstance(raw, ssl.SSLSocket):
        line.close()
        raise SandboxUnavailableError(
            "the docker runtime needs a plain socket to the engine, and this engine's address uses TLS or SSH: "
            "forward it to a local socket (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST) and set "
            "DOCKER_HOST=unix:///tmp/docker.sock."
        )
    duplicate = raw.dup()
    line.close()
    return duplicate


def _explain_start_error(error: Exception, image: str, spec: SandboxSpec) -> Exception:
    """Return the error to raise for a failed start: one that the user can fix, or one for which a retry may help."""
    import docker.errors

    text = str(getattr(error, "explanation", None) or error)
    if isinstance(error, docker.errors.ImageNotFound):
        return SandboxUnavailableError(
            f"the Docker engine has no image '{image}': run `docker pull {image}`, or set `sandbox.image` to "
            "an existing image (`docker images` lists them)."
        )
    if "executable file not found" in text or '"python3"' in text:
        return SandboxUnavailableError(
            f"the Docker image '{image}' has no python3 (3.9 or newer), which the sandbox's agent needs: {text}"
        )
    if "bind source path does not exist" in text or "invalid mount config" in text:
        mounts = ", ".join(f"'{mount.source}' at '{mount.target}'" for mount in spec.mounts)
        return SandboxUnavailableError(
            f"the Docker engine cannot mount {mounts}: {text}. Sources must exist on the engine's own machine."
        )
    return SandboxError(f"Docker cannot start a container: {text}")


def _connect() -> tuple[DockerClient, str]:
    """Connect to the engine, and return the client and the architecture of the engine's machine."""
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailableError(
            f"the docker runtime needs the Docker SDK: {install_extra('docker')} (or choose the runtime 'bubblewrap')."
        ) from error
    try:
        client = docker.from_env()
        machine = str(client.info().get("Architecture"))
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxUnavailableError(
            f"cannot connect to the Docker engine ({error}): start it, set DOCKER_HOST or use the runtime 'bubblewrap'."
        ) from error
    return client, machine


def _remove_stale_containers(client: DockerClient) -> None:
    """Remove containers whose ROLL process was killed between their creation and their start."""
    import docker.errors

    with contextlib.suppress(docker.errors.DockerException, OSError, ValueError):
        for container in client.containers.list(
            all=True, filters={"label": LABEL, "status": "created"}, ignore_removed=True
        ):
            created = datetime.fromisoformat(container.attrs["Created"].split(".")[0].rstrip("Z") + "+00:00")
            if time.time() - created.timestamp() >= STALE_AFTER_S:
                _remove_now(container)


def _query_oom(client: DockerClient | None, container: Container, since: int) -> set[Limit]:
    """Return whether a container that ended by itself ran out of memory, as a set of limits.

    The agent shares the container's memory with the program, so the kernel may have killed the agent.
    """
    import docker.errors

    if client is None:
        return set()
    filters = {"container": container.id, "event": "oom"}
    try:
        found = list(client.api.events(since=since, until=int(time.time()) + 1, filters=filters, decode=True))
    except (docker.errors.DockerException, OSError):
        return set()
    return {Limit.MEMORY} if found else set()


def _close_abandoned(starting: asyncio.Future[tuple[Container, socket.socket]]) -> None:
    """Close the connection of a container whose start was canceled; its agent then ends."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result()[1].close()


def _remove_now(container: Container) -> None:
    import docker.errors

    with contextlib.suppress(docker.errors.DockerException, OSError):  # already removed, since its agent ended first
        container.remove(force=True)


async def _remove(container: Container, ended: asyncio.Future[None]) -> None:
    await asyncio.to_thread(_remove_now, container)
    if not ended.done():
        ended.set_result(None)


class _DockerConnection(AgentConnection):
    """A connection to an agent in Docker's framing: stream(1) zeros(3) length(4, big-endian) data."""

    def __init__(self, on_lost: Any) -> None:
        super().__init__(on_lost)
        self._wrapped = bytearray()

    def data_received(self, data: bytes) -> None:
        """Unwrap Docker's frames and dispatch the agent's; called by the event loop."""
        self._wrapped += data
        start = 0
        while len(self._wrapped) - start >= 8:
            end = start + 8 + int.from_bytes(self._wrapped[start + 4 : start + 8], "big")
            if len(self._wrapped) < end:
                break
            super().data_received(bytes(self._wrapped[start + 8 : end]))
            start = end
        del self._wrapped[:start]
