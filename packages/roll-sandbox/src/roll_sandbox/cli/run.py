"""`roll-sandbox run` and `shell`: run a program or an interactive shell in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import click

from roll_sandbox import Command, Job, Limits, Outcome, Sandbox, SandboxManager, SandboxSpec
from roll_sandbox.cli.common import ByteSize, ServiceAddress, service_options, to_single_line
from roll_sandbox.cli.terminal_filter import TerminalFilter
from roll_sandbox.errors import ConfigError
from roll_sandbox.wire import Message

__all__ = ["run", "shell"]

_OUTPUT_BYTES = 2**26
_DAY_S = 86400.0
_SHELL_COMMAND = "command -v bash >/dev/null && exec bash --norc -i; exec sh -i"
_DETACH_HINT = "exit ends it; Enter ~ . detaches"


@dataclass(frozen=True, kw_only=True)
class _SandboxRequest:
    """The options that select or create the sandbox of a command."""

    service: ServiceAddress
    name: str | None
    spec: SandboxSpec
    keep: bool
    local: bool
    lifetime_s: float | None


@dataclass
class _OpenSandbox:
    """The sandbox in which a command runs its program."""

    sandbox: Sandbox
    name: str
    keep: bool
    """True if the sandbox outlives the command."""
    programs: list[Message]


def _sandbox_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--local", is_flag=True, help="Use a sandbox on this machine, without a service."),
        click.option(
            "--lifetime",
            "lifetime_s",
            type=click.FloatRange(min=1),
            default=None,
            help="Lifetime of the sandbox, in seconds.",
        ),
        click.option(
            "--memory",
            "memory_bytes",
            type=ByteSize(unit=2**20, min_size=2**24),
            default="512MiB",
            show_default=True,
            help="Memory limit, including files; a number without a unit is in MiB.",
        ),
        click.option(
            "--image", default=None, help="Image of the sandbox; by default the programs of the host machine."
        ),
        click.option("--keep", is_flag=True, help="Keep the sandbox afterwards; its name is printed."),
    ):
        command = option(command)
    return command


def _make_spec(image: str | None, memory_bytes: int) -> SandboxSpec:
    limits = Limits(memory_bytes=memory_bytes, disk_bytes=memory_bytes // 2, max_processes=256, wall_s=_DAY_S)
    return SandboxSpec(image=image, limits=limits)


@click.command(context_settings={"allow_interspersed_args": False})
@service_options
@_sandbox_options
@click.option("--in", "name", default=None, metavar="NAME", help="Run in an existing sandbox.")
@click.option(
    "--time", "wall_s", type=click.FloatRange(min=0.1), default=600.0, show_default=True, help="Time limit, in seconds."
)
@click.argument("command", nargs=-1, required=True)
def run(
    service: ServiceAddress,
    name: str | None,
    image: str | None,
    memory_bytes: int,
    keep: bool,
    local: bool,
    lifetime_s: float | None,
    wall_s: float,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND in a new sandbox and exit with its exit code; Ctrl-C kills it. Write options before COMMAND.

    \b
    roll-sandbox run -- python3 -c 'print(1)'
    tar c . | roll-sandbox run --keep -- tar x

    Input that is not a terminal is forwarded. The exit code is 124 if COMMAND exceeds the time limit, and 137 if it
    exceeds another limit.
    """
    request = _SandboxRequest(
        service=service, name=name, spec=_make_spec(image, memory_bytes), keep=keep, local=local, lifetime_s=lifetime_s
    )
    program = Command(argv=command, interactive=not sys.stdin.isatty(), wall_s=wall_s, output_bytes=_OUTPUT_BYTES)
    return asyncio.run(_run_program(request, program))


async def _run_program(request: _SandboxRequest, program: Command) -> int:
    async with _open_sandbox(request) as opened:
        if request.keep:
            click.echo(f"sandbox {opened.name}", err=True)
        job = await opened.sandbox.start(program)
        if program.interactive:
            _forward_input(job)
        try:
            await _print_output(job)
            result = await job.wait()
        finally:
            if not job.done():
                job.kill()
                # The kill must be sent before the connection is closed.
                await asyncio.gather(job.wait(), return_exceptions=True)
    if result.exit_code is not None:
        return result.exit_code
    click.echo(f"The program exceeded a limit: {result.outcome.value} (see --time, --memory).", err=True)
    return 124 if result.outcome in (Outcome.WALL_TIME, Outcome.CPU_TIME) else 137


async def _print_output(job: Job) -> None:
    """Print the job's output: filtered by `TerminalFilter` if stdout is a terminal, unchanged if it is a file or a
    pipe.
    """
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    terminals = {name: TerminalFilter() for name, stream in streams.items() if stream.isatty()}

    def write(name: str, data: bytes) -> None:
        stream = streams[name].buffer
        stream.write(data)
        stream.flush()

    async for chunk in job.stream():
        name = "stdout" if chunk.stream == "stdout" else "stderr"
        write(name, terminals[name].feed(chunk.data).encode() if name in terminals else chunk.data)
    for name, terminal in terminals.items():
        write(name, terminal.feed(b"", end=True).encode())


def _forward_input(job: Job) -> None:
    """Forward standard input to the job in a daemon thread, because a read of standard input may never return."""
    loop = asyncio.get_running_loop()
    source = sys.stdin.fileno()

    def read() -> None:
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # the loop has ended, or stdin cannot be read
            while data := os.read(source, 2**16):
                loop.call_soon_threadsafe(job.write, data)
            loop.call_soon_threadsafe(job.end_input)

    threading.Thread(target=read, daemon=True).start()


@click.command()
@service_options
@_sandbox_options
@click.option("--new", is_flag=True, help="Open another shell even if a detached one is running.")
@click.argument("name", required=False)
def shell(
    service: ServiceAddress,
    name: str | None,
    image: str | None,
    memory_bytes: int,
    keep: bool,
    local: bool,
    lifetime_s: float | None,
    new: bool,
) -> int:
    """Open a shell in a new sandbox, or in the sandbox NAME. If a detached shell runs there, reattach to it.

    All keys are sent to the shell, including Ctrl-C. At the beginning of a line, ~. detaches: the shell keeps running
    for a minute, or with --keep as long as the sandbox lives.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("a shell requires a terminal: without a terminal, use `roll-sandbox run -- COMMAND`.")
    request = _SandboxRequest(
        service=service, name=name, spec=_make_spec(image, memory_bytes), keep=keep, local=local, lifetime_s=lifetime_s
    )
    return asyncio.run(_run_shell(request, new))


async def _run_shell(request: _SandboxRequest, new: bool) -> int:
    from roll_sandbox.cli.terminal import attach_terminal, get_terminal_size
    from roll_sandbox.remote.connection import RemoteSandbox

    async with _open_sandbox(request) as opened:
        running = [each for each in opened.programs if each["terminal"] and each["end"] is None]
        click.secho(f"sandbox {opened.name}   ({'exit ends it' if request.local else _DETACH_HINT})", dim=True)
        if running and not new and isinstance(opened.sandbox, RemoteSandbox):
            job = opened.sandbox.reattach_program(running[-1])
        else:
            prompt = rf"\[\e[2m\]{opened.name[:8]}\[\e[0m\] \w\$ "
            env = {"TERM": os.environ.get("TERM", "xterm"), "PS1": prompt}
            job = await opened.sandbox.start(
                Command(argv=("sh", "-c", _SHELL_COMMAND), env=env, terminal=get_terminal_size(), wall_s=_DAY_S)
            )
        result = await attach_terminal(job)
        if result is None and not request.local:
            opened.keep = True
            click.secho(f"detached; reattach with: roll-sandbox shell {opened.name}", dim=True)
    return 0 if result is None else result.exit_code if result.exit_code is not None else 137


@asynccontextmanager
async def _open_sandbox(request: _SandboxRequest) -> AsyncIterator[_OpenSandbox]:
    """Yield the sandbox that a command's options select or create; then end the sandbox unless `keep` is set."""
    if request.local:
        if request.keep or request.name:
            raise ConfigError(
                "--local cannot be combined with --keep or a sandbox name: a local sandbox ends with its command."
            )
        async with (
            SandboxManager("bubblewrap", spec=request.spec, warm=0) as manager,
            await manager.create() as sandbox,
        ):
            yield _OpenSandbox(sandbox, "here", False, [])
        return
    from roll_sandbox.wire import spec_to_json

    service, name, programs = request.service, request.name, []
    async with service.open_runtime() as runtime:
        if name is not None:
            name = await service.resolve_name(name)
            programs = (await runtime.inspect(name))["programs"]
        elif request.keep:
            created = await service.call(
                "POST", "/v1/sandboxes", {"spec": spec_to_json(request.spec), "lifetime_s": request.lifetime_s}
            )
            name = str(created["sandbox"])
        sandbox = await (
            runtime.attach(name, request.spec) if name else runtime.create(request.spec, lifetime_s=request.lifetime_s)
        )
        opened = _OpenSandbox(sandbox, to_single_line(sandbox.name), keep=name is not None, programs=programs)
        try:
            yield opened
        finally:
            if opened.keep:
                sandbox.detach()
