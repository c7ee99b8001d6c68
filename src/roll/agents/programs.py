"""Runs an agent program: as a coroutine in this process, as a separate process, or in a sandbox."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from roll.agents.failure_messages import describe_failure
from roll.agents.workspace import (
    check_workspace,
    extract_answer,
    open_directory,
    read_answer,
    read_files,
    resolve_command,
)
from roll.errors import ConfigError, InfraError, find_raise_location
from roll.proxies import exclude_local_host_from_proxy
from roll.sandbox_errors import sandbox_errors
from roll.types import Message
from roll.user_code import load_function

if TYPE_CHECKING:
    from roll.config.agents import AgentConfig
    from roll.config.sandbox import SandboxConfig
    from roll_sandbox import SandboxManager, SandboxSpec

__all__ = ["AgentError", "AgentTask", "Program", "check_agent", "open_program"]

MAX_OUTPUT_BYTES = 2**20
"""Maximum number of bytes of a program's output that are kept; the rest is discarded."""
OUTPUT_TIMEOUT_S = 1.0
"""Seconds to wait for the rest of a program's output after it has ended."""
_SOCKET_PATH = "/run/roll/endpoint"
"""Path of the endpoint's socket in a sandbox. The socket itself is mounted: mounting its directory would copy it, and
a copied socket has no server."""
_ADDRESS_TEMPLATE = "http://127.0.0.1:{}"
"""Address of the endpoint within a sandbox; the launcher replaces `{}` by the port."""


class AgentError(Exception):
    """The agent program failed with an error in its own code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTask:
    """The task of one rollout, as an agent receives it."""

    text: str
    """The user's last message."""
    messages: tuple[Message, ...]
    """All messages of the prompt."""
    metadata: Mapping[str, Any]
    """The prompt's metadata, without its answer."""
    rollout: str
    """The name of the rollout, such as `train-3.1`."""
    seed: int | None
    """The rollout's seed; retries use the same seed."""
    time_s: float
    """The agent's time limit in seconds."""


class Program(Protocol):
    """Runs an agent once."""

    async def __call__(self, task: AgentTask, base_url: str, api_key: str) -> str | None:
        """Run the agent, and return its answer, or `None` if the agent returns no answer.

        Raises:
            AgentError: The agent failed with an error in its own code.
            InfraError: The agent could not be run.
        """
        ...


@asynccontextmanager
async def open_program(config: AgentConfig, sandbox: SandboxConfig, socket: Path | None) -> AsyncIterator[Program]:
    """Yield the configured program, and release its resources at the end.

    Args:
        config: The agent's settings.
        sandbox: The run's sandbox settings, for a program in a sandbox.
        socket: The endpoint's Unix socket for sandboxes.

    Raises:
        ConfigError: The function cannot be imported, or a file is missing.
        SandboxUnavailableError: This machine cannot run sandboxes.
    """
    if config.function is not None:
        yield _build_coroutine_program(config.function, config.answer_pattern)
    elif not config.sandbox:
        yield _ProcessProgram(config)
    else:
        assert socket is not None, "sandboxes reach the endpoint by a socket"
        files = {name: _read_content(name, path) for name, path in config.files.items()}
        async with _open_sandbox_manager(sandbox, socket, config.limits.time_s) as (manager, spec):
            yield _SandboxProgram(config, files, manager, spec, str(socket))


def check_agent(config: AgentConfig | None) -> None:
    """Check an agent's settings before anything is started.

    Raises:
        ConfigError: The agent's function cannot be imported or is not a coroutine function, or the agent's program or
            directory is missing.
    """
    if config is None:
        return
    if config.function is not None:
        _build_coroutine_program(config.function, config.answer_pattern)
    check_workspace(config)


def _build_coroutine_program(path: str, answer_pattern: str | None) -> Program:
    function = load_function(path, "agent")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"agent.function '{path}' is not a coroutine function, so it would block the run's event loop: write "
            "`async def`, or run the agent as a separate program (agent.command)."
        )

    async def run(task: AgentTask, base_url: str, api_key: str) -> str | None:
        try:
            answer = await function(task, base_url, api_key)
        except InfraError:
            raise
        except Exception as error:
            raise AgentError(f"{type(error).__name__}: {error} ({find_raise_location(error)})") from error
        return extract_answer(answer, answer_pattern) if isinstance(answer, str) else None

    return run


def _read_content(name: str, path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"agent.files.{name}: '{path}' cannot be read: {error.strerror}. Check the path.") from error


def _build_variables(task: AgentTask, address: str, api_key: str) -> dict[str, str]:
    """Return the environment variables from which an agent's API clients read the endpoint's address and key.

    `ANTHROPIC_BASE_URL` has no `/v1`, because Anthropic's clients append it.
    """
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": api_key,
        "ROLL_TASK": task.text,
        "ROLL_ROLLOUT": task.rollout,
        "ROLL_SEED": "" if task.seed is None else str(task.seed),
    }


class _ProcessProgram:
    """A program that runs as a separate process; when it ends, its whole process group is killed."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._command = resolve_command(config.command or [], config.directory)

    async def __call__(self, task: AgentTask, base_url: str, api_key: str) -> str | None:
        config = self._config
        variables = {**_build_variables(task, base_url.removesuffix("/v1"), api_key), **config.environment}
        async with open_directory(config.directory, task.metadata) as directory:
            code, stdout, stderr = await self._run(task.text.encode(errors="replace"), variables, directory)
            if code:
                raise AgentError(describe_failure(code, stdout, stderr))
            answer = stdout.decode(errors="replace")
            if config.answer_file is not None:
                answer = read_answer((directory or Path()) / config.answer_file, MAX_OUTPUT_BYTES)
        return extract_answer(answer, config.answer_pattern)

    async def _run(self, task: bytes, variables: Mapping[str, str], directory: Path | None) -> tuple[int, bytes, bytes]:
        """Run the command; return its exit code, and the start of standard output and error."""
        output, errors = _OutputReader(), _OutputReader()
        # The input is a file instead of a pipe: a program that does not read it cannot block the writer.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(task)
            stdin.seek(0)
            async with output.open() as stdout, errors.open() as stderr:
                try:
                    process = await asyncio.create_subprocess_exec(
                        *self._command,
                        env=exclude_local_host_from_proxy({**os.environ, **variables}),
                        cwd=directory,
                        stdin=stdin,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,
                    )
                except OSError as error:
                    text = f"agent.command: '{self._command[0]}' cannot be started: {error.strerror}."
                    raise ConfigError(text) from error
                try:
                    code = await process.wait()
                finally:
                    with suppress(ProcessLookupError):  # the group includes processes that the program left running
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        return code, output.received, errors.received


class _OutputReader(asyncio.Protocol):
    """Reads a program's output from a pipe, and stores only the beginning.

    asyncio's own pipes are not used: `process.wait()` would wait until every process that inherited a pipe closes it.
    """

    def __init__(self) -> None:
        self.received = b""
        self._ended = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        """Yield the file descriptor of the pipe's write end; afterwards, `received` contains the output."""
        ours, theirs = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(ours, "rb"))
        try:
            yield theirs
        finally:
            os.close(theirs)
            try:
                await asyncio.wait(
                    {self._ended}, timeout=OUTPUT_TIMEOUT_S
                )  # another process may still hold the write end
            finally:
                transport.close()

    def data_received(self, data: bytes) -> None:
        """Append the data to `received`, up to the limit; called by the event loop."""
        self.received += data[: MAX_OUTPUT_BYTES - len(self.received)]

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that all write ends are closed; called by the event loop."""
        if not self._ended.done():
            self._ended.set_result(None)


@asynccontextmanager
async def _open_sandbox_manager(
    config: SandboxConfig, socket: Path, timeout_s: float
) -> AsyncIterator[tuple[SandboxManager, SandboxSpec]]:
    from roll_sandbox import Limits, Mount, SandboxManager, SandboxSpec

    if config.url is not None:
        raise ConfigError(
            "agent.sandbox: an agent in a sandbox connects to the endpoint through a socket on this machine, which "
            f"sandboxes of the service at {config.url} cannot reach: remove sandbox.url or agent.sandbox."
        )
    unsafe = config.runtime == "subprocess"  # this runtime has no file system of its own
    spec = SandboxSpec(
        limits=Limits(
            wall_s=timeout_s,
            memory_bytes=config.memory_bytes,
            max_processes=config.max_processes,
            disk_bytes=config.disk_bytes,
            file_size_bytes=config.disk_bytes,
            output_bytes=MAX_OUTPUT_BYTES,
        ),
        trust="trusted" if config.trust_programs else "untrusted",
        mounts=() if unsafe else (Mount(source=str(socket), target=_SOCKET_PATH),),
        pool="agents",
        image=config.image,
    )
    with sandbox_errors():
        async with SandboxManager(config.runtime, spec=spec, warm=config.warm) as manager:
            yield manager, spec


class _SandboxProgram:
    """A program that runs in a sandbox, with its files and a connection to the endpoint."""

    def __init__(
        self, config: AgentConfig, files: Mapping[str, bytes], manager: SandboxManager, spec: SandboxSpec, socket: str
    ) -> None:
        self._config, self._command, self._files = config, config.command or [], files
        self._manager, self._spec = manager, spec
        self._socket = spec.mounts[0].target if spec.mounts else socket
        self._launcher = (Path(__file__).parent / "sandbox_launcher" / "launch.py").read_text(encoding="utf-8")

    async def __call__(self, task: AgentTask, base_url: str, api_key: str) -> str | None:
        from roll_sandbox import Command, SandboxError

        config = self._config
        variables = {
            f"ROLL_PORT_VARIABLE_{name}" if _ADDRESS_TEMPLATE in value else name: value
            for name, value in _build_variables(task, _ADDRESS_TEMPLATE, api_key).items()
        }
        answer_file = config.answer_file or ""
        files = await asyncio.to_thread(read_files, config.directory, task.metadata)
        # -I, so that files of the agent cannot replace modules that the launcher imports.
        program = Command(
            argv=("python3", "-I", "-c", self._launcher, self._socket, answer_file, *self._command),
            stdin=task.text.encode(errors="replace"),
            files={**files, **self._files},
            env=exclude_local_host_from_proxy({**variables, **config.environment}),
            result=bool(answer_file),
        )
        try:
            with sandbox_errors():
                result = await self._manager.execute(program, spec=self._spec)
        except SandboxError as error:
            raise InfraError(f"the agent's sandbox failed: {error}") from error
        if not result.ok:
            reason = str(result.outcome) if result.exit_code is None else result.exit_code
            raise AgentError(describe_failure(reason, result.stdout, result.stderr))
        answer = result.result[:MAX_OUTPUT_BYTES] if answer_file else result.stdout
        return extract_answer(answer.decode(errors="replace"), config.answer_pattern)
