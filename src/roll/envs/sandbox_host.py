"""Environments in sandboxes, one per episode: processes without access to this machine or to other episodes.

    call ─► line of JSON ─► standard input ─► `episode_program` ─► file descriptor 3 ─► line of JSON ─► value

The output is untrusted: the length of a line is bounded, and its values are checked as for any environment. The sandbox
contains the packages of this Python and, for a class in a file, only that file.
"""

from __future__ import annotations

import asyncio
import json
import sysconfig
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import roll_sandbox
from roll.config.sandbox import SandboxConfig
from roll.envs.base import ResetResult, StepResult
from roll.envs.hosting import HostedEnv
from roll.errors import InfraError
from roll.sandbox_errors import sandbox_errors
from roll.sandboxes import build_manager
from roll.types import EnvironmentSettings
from roll_sandbox import Job, Limits, Mount, PythonCode, SandboxManager, SandboxSpec

__all__ = ["SandboxHost"]

_LIBRARY_MOUNT_PATH = "/opt/roll"
_PROGRAM_MODULE = "roll.envs.episode_program"
MAX_EPISODE_S = 86_400.0
"""Maximum duration of an episode in seconds; the limits of an episode end it long before."""
MAX_LINE_BYTES = 2**24


class SandboxHost:
    """Runs each environment in its own sandbox. The first environment starts the sandbox manager.

    Args:
        config: Isolation and limits of the sandboxes.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._manager: SandboxManager | None = None
        self._starting = asyncio.Lock()

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """See `Host`."""
        # Concurrent episodes must not start two managers.
        async with self._starting:
            if self._manager is None:
                manager = build_manager(self._config, spec=self._build_spec(), warm=0)
                with sandbox_errors():
                    await manager.start()
                self._manager = manager
        place, _, kind = settings.name.rpartition(":")
        file = Path(place).expanduser().resolve() if place.endswith(".py") else None
        files, name = {}, settings.name
        if file is not None:
            files, name = {file.name: await asyncio.to_thread(file.read_bytes)}, f"{file.name}:{kind}"
        source = f"from {_PROGRAM_MODULE} import main; main()"
        program = PythonCode(source=source, files=files, interactive=True, result=True)
        stack = AsyncExitStack()
        with sandbox_errors():
            job = await stack.enter_async_context(self._manager.run_interactive(program, spec=self._build_spec()))
        env = _SandboxEnv(job, stack)
        try:
            options, wrappers = dict(settings.options), [list(pair) for pair in settings.wrappers]
            await env.call("start", name=name, options=options, wrappers=wrappers)
        # The sandbox must be closed even if this start is canceled.
        except BaseException:
            await env.close()
            raise
        return env

    @property
    def _shares_file_system(self) -> bool:
        """True if the sandbox shares the file system of this machine."""
        return self._config.runtime == "subprocess"

    def _build_spec(self) -> SandboxSpec:
        config, packages = self._config, sysconfig.get_paths()["purelib"]
        library, sandbox = str(Path(__file__).parents[2]), str(Path(roll_sandbox.__file__).parents[1])
        places = {
            library: "source",
            packages: "site",
            **({} if sandbox in (library, packages) else {sandbox: "sandbox"}),  # no directory is mounted twice
        }
        limits = Limits(
            wall_s=MAX_EPISODE_S,
            memory_bytes=config.memory_bytes,
            max_processes=config.max_processes,
            disk_bytes=config.disk_bytes,
            file_size_bytes=config.disk_bytes,
            output_bytes=2**30,
        )
        if self._shares_file_system:
            return SandboxSpec(limits=limits, trust="trusted", python_path=tuple(places))
        mounts = [Mount(source=place, target=f"{_LIBRARY_MOUNT_PATH}/{name}") for place, name in places.items()]
        return SandboxSpec(
            limits=limits,
            trust="untrusted",
            mounts=tuple(mounts),
            python_path=tuple(mount.target for mount in mounts),
            preload=("asyncio", "inspect", "json"),
            pool="environment",
            image=config.image,
        )

    async def close(self) -> None:
        """See `Host`."""
        if self._manager is not None:
            await self._manager.close()


class _SandboxEnv:
    def __init__(self, job: Job, stack: AsyncExitStack) -> None:
        self._job, self._stack = job, stack
        self._chunks = job.stream()
        self._held = bytearray()

    async def reset(self, seed: int | None = None) -> ResetResult:
        result = await self.call("reset", seed=seed)
        return tuple(result) if isinstance(result, list) else result

    async def step(self, action: str) -> StepResult:
        result = await self.call("step", action=action)
        return tuple(result) if isinstance(result, list) else result

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the environment and return its result.

        Raises:
            InfraError: The call failed, or the environment's process ended.
        """
        self._job.write(json.dumps({"call": method, **arguments}).encode() + b"\n")
        try:
            reply = json.loads(await self._read_line())
        except (ValueError, RecursionError) as error:
            raise InfraError(f"the environment's response is not valid JSON: {error}") from error
        if isinstance(reply, dict) and "value" in reply:
            return reply["value"]
        raise InfraError(
            str(reply.get("error"))[:1000]
            if isinstance(reply, dict)
            else "the environment's response is not a JSON object"
        )

    async def _read_line(self) -> bytes:
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > MAX_LINE_BYTES:
                raise InfraError(f"the environment's response exceeds {MAX_LINE_BYTES} bytes")
            with sandbox_errors():
                chunk = await anext(self._chunks, None)
            if chunk is None:
                with sandbox_errors():
                    result = await self._job.wait()
                last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
                raise InfraError(
                    f"the environment's sandbox ended: {result.outcome}{''.join(f': {line}' for line in last)}"
                )
            if chunk.stream == "result":
                self._held += chunk.data
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line

    async def close(self) -> None:
        self._job.kill()
        await self._stack.aclose()
