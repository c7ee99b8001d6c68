"""The `bubblewrap` runtime, the default on Linux: sandboxes in unprivileged namespaces.

    manager's process ── spawner (one, small) ── bwrap ── agent ── programs
                              │  └ user and control group per sandbox
                              └── zygote ── slot ── agent ── programs        (as root: no exec, no start of Python)

bwrap gives a sandbox its own user, PID, network, IPC, UTS, mount and cgroup namespaces over a read-only system. The
agent is the first process of the sandbox. It keeps the three capabilities that it needs to create namespaces for every
program, and drops them in programs. If ROLL runs as root, each sandbox has its own UID and control group, and forks of
a zygote create the same namespaces without bwrap (`host/zygote.py`). docs/security.md lists the attacks that each
mechanism prevents.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from dataclasses import replace
from typing import IO, Any

from roll_sandbox.agent_code import AGENT_READER, get_agent_bytecode, get_zygote_bytecode
from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.connection import AgentConnection
from roll_sandbox.counters import Counters
from roll_sandbox.errors import SandboxError, SandboxUnavailableError
from roll_sandbox.images import Image, ImageCache
from roll_sandbox.images.system import find_python_command, make_agent_image, make_image_environment
from roll_sandbox.requests import make_agent_settings
from roll_sandbox.roots import RootFileSystem, RootFileSystems
from roll_sandbox.seccomp import SUPPORTED_ARCHITECTURES, make_seccomp_filter
from roll_sandbox.spawner import SandboxProcess, SpawnerClient
from roll_sandbox.system_plan import HOME, find_interpreter, make_environment
from roll_sandbox.types import SandboxSpec

__all__ = ["BubblewrapRuntime"]

_log = logging.getLogger(__name__)

_NAMESPACE_ARGUMENTS = [
    "--unshare-user",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",  # the kernel may have been built without cgroup namespaces
    "--hostname",
    "sandbox",
    "--as-pid-1",  # no init of bwrap's own: the agent reaps
    "--die-with-parent",
    "--new-session",  # otherwise TIOCSTI could type into the caller's terminal (CVE-2017-5226)
    "--cap-add",
    "CAP_SYS_ADMIN",
    "--cap-add",
    "CAP_SETPCAP",
    "--cap-add",
    "CAP_NET_ADMIN",
]
_USER_ARGUMENTS = ["--uid", "1000", "--gid", "1000"]
# setns(2) into the first mount namespace needs CAP_SYS_CHROOT; overlayfs creates files with the capabilities of the
# process that mounted it, and must override the modes of the image's directories.
_IMAGE_CAPABILITIES = ["--cap-add", "CAP_SYS_CHROOT", "--cap-add", "CAP_DAC_OVERRIDE"]
_AGENT_ARGUMENTS = ["-SsPB", "-c", AGENT_READER]
_PYTHON = [str(find_interpreter()), *_AGENT_ARGUMENTS]
_CLOSED_MESSAGE = "the bubblewrap runtime was not started, or is closed"
_NO_ZYGOTE_WARNING = (
    "cannot fork sandboxes from a zygote; every sandbox is started with bwrap instead, which is slower: %s"
)
_CLOSE_DELAY_S = 1.0
"""Seconds to wait for the last output of a sandbox that has ended."""
INSTALL_HINT = "Install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)."


class BubblewrapRuntime:
    """Runs every sandbox in unprivileged namespaces; see `runtime.Runtime`.

    Args:
        zygote: if true, fork sandboxes from a zygote if possible; otherwise bwrap starts every sandbox.
    """

    name = "bubblewrap"
    fresh_programs = True

    def __init__(self, *, zygote: bool = True) -> None:
        self._zygote = zygote
        self._spawner: SpawnerClient | None = None
        self._bwrap = ""
        self._filter = b""
        self._code_fd = -1
        self._stderr_file: IO[bytes] | None = None
        self._cache = ImageCache()
        self._roots = RootFileSystems(self._cache)
        self._supports_overlays: bool | None = None
        """True if sandboxes can mount overlays over an image; `None` until this was tested."""
        self._spawner_lock = asyncio.Lock()
        self._overlay_lock = asyncio.Lock()
        self._limit_flags: dict[str, Any] = {}

    async def start(self) -> None:
        """Find bwrap, start the spawner, and start a sandbox as a test."""
        if self._spawner is not None:
            return
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        self._bwrap = shutil.which("bwrap") or ""
        if not self._bwrap:
            raise SandboxUnavailableError(
                f"the bubblewrap runtime requires the program 'bwrap', which is not in PATH. {INSTALL_HINT}"
            )
        if os.uname().machine not in SUPPORTED_ARCHITECTURES:
            raise SandboxUnavailableError(
                f"the architecture '{os.uname().machine}' is not supported; supported architectures: "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}."
            )
        self._filter = make_seccomp_filter()
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        # In memory, so that no file of this package has to be visible in a sandbox.
        self._code_fd = os.memfd_create("roll-agent")
        os.write(self._code_fd, get_agent_bytecode())
        self._spawner = await self._start_spawner()
        facts = self._spawner.facts
        if not facts["groups"]:
            _log.info("cannot create cgroups; the agent samples the memory usage of sandboxes instead")
        self._limit_flags = {
            "counts_cpu": facts["cpu"],
            "limit_processes": not facts["groups"],
            "limit_address_space": not facts["groups"],
            "watch_memory": not facts["groups"],
        }
        try:
            await self._run_test_sandbox()
        except SandboxError as error:
            raise SandboxUnavailableError(
                f"bubblewrap is installed but cannot start a sandbox: {error}. It requires unprivileged user "
                "namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0; on Ubuntu 24.04 "
                "also kernel.apparmor_restrict_unprivileged_userns=0; in a container: --security-opt "
                "seccomp=unconfined)."
            ) from error

    async def _start_spawner(self) -> SpawnerClient:
        """Start and return a spawner, with a zygote if this is possible and enabled."""
        spawner = await SpawnerClient.start()
        try:
            if self._zygote and spawner.facts["root"]:
                await self._start_zygote(spawner)
        except BaseException:
            await spawner.close()
            raise
        return spawner

    async def _start_zygote(self, spawner: SpawnerClient) -> None:
        """Start the zygote; if this fails twice, log a warning and let bwrap start every sandbox."""
        code = os.memfd_create("roll-zygote")
        try:
            os.write(code, get_zygote_bytecode())
            for last in (False, True):
                try:
                    await spawner.start_zygote(_PYTHON, self._get_stderr_fd(), code)
                    return
                except SandboxError as error:
                    if spawner.is_lost:
                        raise
                    if last:
                        _log.warning(_NO_ZYGOTE_WARNING, error)
                        self._zygote = False
        finally:
            os.close(code)

    async def _run_test_sandbox(self) -> None:
        """Start a sandbox as a test; if forks of the zygote fail, try again with bwrap."""
        try:
            sandbox = await self.launch(SandboxSpec())
            await sandbox.wait_until_ready()
            await sandbox.close()
        except SandboxError as error:
            if not self._zygote:
                raise
            _log.warning(_NO_ZYGOTE_WARNING, error)
            self._zygote = False
            await self._run_test_sandbox()

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox.

        Raises:
            UnknownImageError: this machine has no such image.
        """
        spec = self.resolve(spec)
        image = None if spec.image is None else self._cache.resolve(spec.image)
        if image is not None and self._supports_overlays is None:
            await self._test_overlays(SandboxSpec(image=spec.image), image)
        return await self._launch(spec, image)

    async def _launch(self, spec: SandboxSpec, image: Image | None) -> Sandbox:
        spawner = self._spawner
        if spawner is None:
            raise SandboxError(_CLOSED_MESSAGE)
        if spawner.is_lost:
            spawner = await self._restart_spawner(spawner)
        merged = self._supports_overlays is False
        root = await self._roots.acquire(spawner, spec, image, merged=merged)
        try:
            child = await self._spawn(spawner, spec, root, image)
        except BaseException:
            self._roots.release(root)
            raise
        settings = make_agent_settings(
            spec,
            home=HOME,
            env=make_image_environment(image) if image else make_environment(),
            image=make_agent_image(image, spec.mounts, merged=merged) if image else None,
            isolated=True,
            mount_space=True,
            has_own_cgroup=False,
            filter=self._filter,
            **self._limit_flags,
        )
        loop = asyncio.get_running_loop()
        child.ended.add_done_callback(lambda _: self._roots.release(root))
        connection = AgentConnection(self._describe_spawner_exit)
        # Closing the connection ends the agent, even if it has outlived its parent processes.
        child.ended.add_done_callback(lambda _: loop.call_later(_CLOSE_DELAY_S, connection.close))
        try:
            await loop.create_unix_connection(lambda: connection, sock=child.socket)
        except BaseException:
            child.socket.close()
            child.kill()
            raise
        return Sandbox(
            spec,
            settings,
            connection,
            destroy=child.kill,
            ended=child.ended,
            counters=Counters(child.counters),
        )

    async def _test_overlays(self, spec: SandboxSpec, image: Image) -> None:
        """Start a test sandbox with `image`, and record whether sandboxes can mount overlays; do nothing if this is
        already known.
        """
        async with self._overlay_lock:
            if self._supports_overlays is not None:
                return
            sandbox = await self._launch(spec, image)
            try:
                await sandbox.wait_until_ready()
                self._supports_overlays = True
            except SandboxError as error:
                self._supports_overlays = False
                _log.warning(
                    "cannot mount overlays in sandboxes; images are merged into one read-only layer: %s",
                    error,
                )
            finally:
                await sandbox.close()

    async def _spawn(
        self, spawner: SpawnerClient, spec: SandboxSpec, root: RootFileSystem, image: Image | None
    ) -> SandboxProcess:
        """Start a sandbox, whose agent then waits for settings, and return the sandbox's outermost process."""
        # bwrap starts sandboxes with an image: their ID-mapped layers need root, which a slot has given up.
        tree = root.tree if self._zygote and root.tree and image is None else None
        arguments: list[str] = []
        if tree is None:
            user = (
                ["--uid", str(image.uid), "--gid", str(image.gid), *_IMAGE_CAPABILITIES] if image else _USER_ARGUMENTS
            )
            python = [*find_python_command(), *_AGENT_ARGUMENTS] if image else _PYTHON
            arguments = [self._bwrap, *_NAMESPACE_ARGUMENTS, *user, *root.arguments, "--", *python]
        limits = {"max_processes": spec.limits.max_processes, "memory_bytes": spec.limits.memory_bytes}
        return await spawner.spawn(tree, arguments, root.layers, limits, self._get_stderr_fd(), self._code_fd)

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with the image's digest instead of its name, since the name may later refer to another image.

        Raises:
            UnknownImageError: this machine has no such image.
        """
        return spec if spec.image is None else replace(spec, image=self._cache.resolve(spec.image).digest)

    async def _restart_spawner(self, lost_spawner: SpawnerClient) -> SpawnerClient:
        """Replace `lost_spawner`, which was killed together with its sandboxes, and return the current spawner.

        Raises:
            SandboxError: no spawner can be started, or the runtime was closed.
        """
        async with self._spawner_lock:
            if self._spawner is lost_spawner:
                _log.warning("the spawner process was killed together with all sandboxes; restarting it")
                await lost_spawner.close()
                try:
                    spawner = await self._start_spawner()
                except SandboxUnavailableError as error:  # it was available before, so a retry may succeed
                    raise SandboxError(str(error)) from error
                if self._spawner is lost_spawner:
                    self._spawner = spawner
                else:  # the runtime was closed meanwhile
                    await spawner.close()
        if self._spawner is None:
            raise SandboxError(_CLOSED_MESSAGE)
        return self._spawner

    def _get_stderr_fd(self) -> int:
        """Return the file descriptor to which bwrap and agents write error messages.

        Raises:
            SandboxError: the runtime was closed.
        """
        if self._stderr_file is None:
            raise SandboxError(_CLOSED_MESSAGE)
        return self._stderr_file.fileno()

    def _describe_spawner_exit(self) -> str:
        """Return the error message for a sandbox that ended unexpectedly, with the last output of bwrap or an agent."""
        complaint = ""
        if self._stderr_file is not None:
            size = os.fstat(self._stderr_file.fileno()).st_size
            complaint = os.pread(self._stderr_file.fileno(), 400, max(0, size - 400)).decode(errors="replace").strip()
        return "the sandbox ended unexpectedly" + (f" (last message: {complaint})" if complaint else "")

    async def close(self) -> None:
        """End every sandbox."""
        spawner, self._spawner = self._spawner, None
        async with self._spawner_lock:  # `_restart_spawner` closes a spawner that it is starting
            if spawner is not None:
                await spawner.close()
            if self._spawner is not None:
                return  # started again meanwhile
            if self._code_fd >= 0:
                os.close(self._code_fd)
                self._code_fd = -1
            if self._stderr_file is not None:
                self._stderr_file.close()
                self._stderr_file = None
            self._roots.clear()
