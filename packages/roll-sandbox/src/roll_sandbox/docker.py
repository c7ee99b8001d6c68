"""The `docker` runtime: one container per sandbox, through the Docker SDK, with Docker images.

The image must have Python 3.9 or newer as `python3`, and bash for sessions. The container has no network, no
capabilities, a read-only system, limits on memory and processes, and Docker's system-call filter in addition to the
filter of this package. The agent is the container's first process, which programs cannot reach. A program gets no
namespaces of its own, so every program runs in a new container.

    launch ──► engine: create, attach, start ──► connection to the agent: the container's stdin and stdout
    close, or the end of this process ──► the connection closes ──► the agent ends ──► the engine removes the container

Invariants:
    - every container that was created is removed, even if it did not start or if its caller was canceled;
    - `close` leaves no container with this runtime's label;
    - if a process is killed between creating and starting a container, the next runtime removes the container.
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

from roll_sandbox.agent_code import get_agent_source
from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.connection import AgentConnection
from roll_sandbox.counters import Counters
from roll_sandbox.errors import SandboxError, SandboxUnavailableError
from roll_sandbox.requests import make_agent_settings
from roll_sandbox.seccomp import SUPPORTED_ARCHITECTURES, make_seccomp_filter
from roll_sandbox.system_plan import HOME
from roll_sandbox.types import Limit, SandboxSpec
from roll_sandbox.version import get_install_command

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

__all__ = ["DEFAULT_IMAGE", "DockerRuntime"]

_log = logging.getLogger(__name__)

DEFAULT_IMAGE = "python:3.11-slim"
LABEL = "roll_sandbox"
STALE_AFTER_S = 600.0
"""Age in seconds at which a container that was created but never started is removed."""
_OVERHEAD_BYTES = 32 * 2**20
_OVERHEAD_PROCESSES = 4
_USER = "1000:1000"


class DockerRuntime:
    """Runs every sandbox in a Docker container; see `runtime.Runtime`."""

    name = "docker"
    fresh_programs = False

    def __init__(self, *, default_image: str = DEFAULT_IMAGE) -> None:
        self._default_image = default_image
        self._client: DockerClient | None = None
        self._label = uuid.uuid4().hex
        self._sandboxes: set[Sandbox] = set()
        self._filter = b""

    async def start(self) -> None:
        """Connect to the Docker engine, and remove containers that killed processes have left there."""
        if self._client is None:
            self._client, machine = await asyncio.to_thread(_connect)
            await asyncio.to_thread(_remove_stale_containers, self._client)
            if machine in SUPPORTED_ARCHITECTURES:
                self._filter = make_seccomp_filter(machine)
            else:
                _log.warning(
                    "no system-call filter is available for '%s'; only Docker's default filter applies", machine
                )

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec unchanged: the engine resolves image names."""
        return spec

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a container, and return the sandbox in it.

        Raises:
            SandboxUnavailableError: the image or a mount does not exist, or the image has no Python.
        """
        if self._client is None:
            raise SandboxError("the docker runtime was not started, or is closed")
        since = int(time.time())
        starting = asyncio.ensure_future(asyncio.to_thread(self._start_container, self._client, spec))
        try:
            container, agent_socket = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close_abandoned_connection)
            raise
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        removal: list[asyncio.Task[None]] = []

        def destroy() -> None:
            if not removal:
                removal.append(loop.create_task(_wait_and_remove(container, ended)))

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
        await loop.create_connection(lambda: connection, sock=agent_socket)
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
                ["python3", "-SsB", "-c", get_agent_source()],
                **_make_container_settings(spec),
                labels={LABEL: self._label},
            )
            # Attach before the start, so that no output of the agent is missed.
            attached = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 0, "stream": 1})
            connection = _detach_socket(attached)
            container.start()
        except BaseException as error:
            if container is not None:
                _remove_container(container)
            if isinstance(error, (docker.errors.DockerException, OSError)):
                raise _explain_start_error(error, image, spec) from error
            raise
        return container, connection

    async def close(self) -> None:
        """End every container."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(self._remove_leftovers, client)
            await asyncio.to_thread(client.close)

    def _remove_leftovers(self, client: DockerClient) -> None:
        """Remove the containers of this runtime that still exist because their start was canceled."""
        import docker.errors

        with contextlib.suppress(docker.errors.DockerException, OSError):  # the engine has ended, with its containers
            for container in client.containers.list(
                all=True, filters={"label": f"{LABEL}={self._label}"}, ignore_removed=True
            ):
                _remove_container(container)


def _make_container_settings(spec: SandboxSpec) -> dict[str, Any]:
    """Return the arguments with which the Docker SDK creates the container."""
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
        # This is the sum of memory and swap: with the same number as the memory, the container has no swap.
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
        # The engine removes the container, even if this process was killed.
        "auto_remove": True,
        "ipc_mode": "private",
        # The default driver would write all output of programs to a file without a bound.
        "log_config": docker.types.LogConfig(type="none"),
    }


def _detach_socket(attached: Any) -> socket.socket:
    """Return a plain socket for `attached`, the Docker SDK's connection to an agent, and close `attached`.

    Raises:
        SandboxUnavailableError: the connection uses TLS or SSH.
    """
    raw: Any = getattr(attached, "_sock", attached)
    if not isinstance(raw, socket.socket) or isinstance(raw, ssl.SSLSocket):
        attached.close()
        raise SandboxUnavailableError(
            "the docker runtime requires an unencrypted connection to the Docker engine, but DOCKER_HOST uses TLS or "
            "SSH: forward it to a local socket (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST) and set "
            "DOCKER_HOST=unix:///tmp/docker.sock."
        )
    duplicate = raw.dup()
    attached.close()
    return duplicate


def _explain_start_error(error: Exception, image: str, spec: SandboxSpec) -> Exception:
    """Return the error to raise for a container that did not start: `SandboxUnavailableError`, with advice, if the
    cause is known; otherwise `SandboxError`, after which the start may be retried.
    """
    import docker.errors

    text = str(getattr(error, "explanation", None) or error)
    if isinstance(error, docker.errors.ImageNotFound):
        return SandboxUnavailableError(
            f"the Docker engine has no image '{image}': run `docker pull {image}`, or set `sandbox.image` to "
            "an existing image (`docker images` lists them)."
        )
    if "executable file not found" in text or '"python3"' in text:
        return SandboxUnavailableError(
            f"the Docker image '{image}' does not contain python3 (3.9 or newer), which the sandbox agent requires: "
            f"{text}"
        )
    if "bind source path does not exist" in text or "invalid mount config" in text:
        mounts = ", ".join(f"'{mount.source}' at '{mount.target}'" for mount in spec.mounts)
        return SandboxUnavailableError(
            f"the Docker engine cannot mount {mounts}: {text}. Sources must exist on the engine's machine."
        )
    return SandboxError(f"Docker cannot start a container: {text}")


def _connect() -> tuple[DockerClient, str]:
    """Connect to the engine, and return the client and the architecture of the engine's machine."""
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailableError(
            f"the docker runtime requires the Docker SDK: run `{get_install_command('docker')}`, or use the "
            "bubblewrap runtime."
        ) from error
    try:
        client = docker.from_env()
        machine = str(client.info().get("Architecture"))
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxUnavailableError(
            f"cannot connect to the Docker engine ({error}): start it, set DOCKER_HOST, or use the bubblewrap runtime."
        ) from error
    return client, machine


def _remove_stale_containers(client: DockerClient) -> None:
    """Remove containers older than `STALE_AFTER_S` that were never started because their ROLL process was killed."""
    import docker.errors

    with contextlib.suppress(docker.errors.DockerException, OSError, ValueError):
        for container in client.containers.list(
            all=True, filters={"label": LABEL, "status": "created"}, ignore_removed=True
        ):
            created = datetime.fromisoformat(container.attrs["Created"].split(".")[0].rstrip("Z") + "+00:00")
            if time.time() - created.timestamp() >= STALE_AFTER_S:
                _remove_container(container)


def _query_oom(client: DockerClient | None, container: Container, since: int) -> set[Limit]:
    """Return `{Limit.MEMORY}` if the engine reports that the container ran out of memory after the time `since`;
    otherwise return an empty set.

    The agent shares the container's memory limit with the program, so the kernel may have killed the agent.
    """
    import docker.errors

    if client is None:
        return set()
    filters = {"container": container.id, "event": "oom"}
    try:
        events = list(client.api.events(since=since, until=int(time.time()) + 1, filters=filters, decode=True))
    except (docker.errors.DockerException, OSError):
        return set()
    return {Limit.MEMORY} if events else set()


def _close_abandoned_connection(start_future: asyncio.Future[tuple[Container, socket.socket]]) -> None:
    """Close the connection of a container whose start was canceled, so that its agent ends."""
    if not start_future.cancelled() and start_future.exception() is None:
        start_future.result()[1].close()


def _remove_container(container: Container) -> None:
    import docker.errors

    with contextlib.suppress(docker.errors.DockerException, OSError):  # already removed, since its agent ended first
        container.remove(force=True)


async def _wait_and_remove(container: Container, ended: asyncio.Future[None]) -> None:
    await asyncio.to_thread(_remove_container, container)
    if not ended.done():
        ended.set_result(None)


class _DockerConnection(AgentConnection):
    """A connection to an agent; unwraps Docker's frames: stream(1) zeros(3) length(4, big-endian) data."""

    def __init__(self, on_lost: Any) -> None:
        super().__init__(on_lost)
        self._wrapped = bytearray()

    def data_received(self, data: bytes) -> None:
        """Unwrap all complete frames of Docker, and dispatch the agent's frames in them; called by the event loop."""
        self._wrapped += data
        start = 0
        while len(self._wrapped) - start >= 8:
            end = start + 8 + int.from_bytes(self._wrapped[start + 4 : start + 8], "big")
            if len(self._wrapped) < end:
                break
            super().data_received(bytes(self._wrapped[start + 8 : end]))
            start = end
        del self._wrapped[:start]
