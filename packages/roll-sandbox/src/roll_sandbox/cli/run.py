"""`roll-sandbox run` and `shell`: a program, or a user's shell, in a sandbox."""

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
from roll_sandbox.cli.common import Bytes, ServiceAddress, service_options, to_single_line
from roll_sandbox.cli.terminal_filter import TerminalFilter
from roll_sandbox.errors import ConfigError
from roll_sandbox.wire import Message

__all__ = ["run", "shell"]

_OUTPUT_BYTES = 2**26
_DAY_S = 86400.0
_SHELL = "command -v bash >/dev/null && exec bash --norc -i; exec sh -i"
_LEAVE_HINT = "exit ends it; Enter ~ . detaches"


@dataclass(frozen=True, kw_only=True)
class _SandboxRequest:
    """The sandbox that a command is to use."""

    place: ServiceAddress
    name: str | None
    spec: SandboxSpec
    keep: bool
    local: bool
    lifetime_s: float | None


@dataclass
class _OpenSandbox:
    """The sandbox that a command has opened."""

    sandbox: Sandbox
    name: str
    keep: bool
    """Whether the sandbox outlives the command."""
    programs: list[Message]


def _sandbox_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--local", is_flag=True, help="Use a sandbox of this machine, without a service."),
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
            type=Bytes(unit=2**20, least=2**24),
            default="512MiB",
            show_default=True,
            help="Memory limit, including files; a number without a unit is in MiB.",
        ),
        click.option("--image", default=None, help="Image of the sandbox; by default this machine's programs."),
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
    place: ServiceAddress,
    name: str | None,
    image: str | None,
    memory_bytes: int,
    keep: bool,
    local: bool,
    lifetime_s: float | None,
    wall_s: float,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND in a new sandbox and exit with its exit code; Ctrl-C kills it. Options go before it.

    \b
    roll-sandbox run -- python3 -c 'print(1)'
    tar c . | roll-sandbox run --keep -- tar x

    Input that is not a terminal is forwarded. The exit code is 124 over the time limit, 137 over another limit.
    """
    wanted = _SandboxRequest(
        place=place, name=name, spec=_make_spec(image, memory_bytes), keep=keep, local=local, lifetime_s=lifetime_s
    )
    program = Command(argv=command, interactive=not sys.stdin.isatty(), wall_s=wall_s, output_bytes=_OUTPUT_BYTES)
    return asyncio.run(_run(wanted, program))


async def _run(wanted: _SandboxRequest, program: Command) -> int:
    async with _open_sandbox(wanted) as here:
        if wanted.keep:
            click.echo(f"sandbox {here.name}", err=True)
        job = await here.sandbox.start(program)
        if program.interactive:
            _forward_input(job)
        try:
            await _print(job)
            result = await job.wait()
        finally:
            if not job.done():
                job.kill()
                await asyncio.gather(job.wait(), return_exceptions=True)
    if result.exit_code is not None:
        return result.exit_code
    click.echo(f"The program exceeded a limit: {result.outcome.value} (see --time, --memory).", err=True)
    return 124 if result.outcome in (Outcome.WALL_TIME, Outcome.CPU_TIME) else 137


async def _print(job: Job) -> None:
    """Print the job's output byte for byte; on a terminal, make control sequences in it harmless."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    terminals = {name: TerminalFilter() for name, stream in streams.items() if stream.isatty()}

    def say(name: str, data: bytes) -> None:
        stream = streams[name].buffer
        stream.write(data)
        stream.flush()

    async for chunk in job.stream():
        name = "stdout" if chunk.stream == "stdout" else "stderr"
        say(name, terminals[name].feed(chunk.data).encode() if name in terminals else chunk.data)
    for name, terminal in terminals.items():
        say(name, terminal.feed(b"", end=True).encode())


def _forward_input(job: Job) -> None:
    """Forward standard input in a daemon thread, since a read of it may never return."""
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
    place: ServiceAddress,
    name: str | None,
    image: str | None,
    memory_bytes: int,
    keep: bool,
    local: bool,
    lifetime_s: float | None,
    new: bool,
) -> int:
    """Open a shell in a new sandbox, or in NAME; reattach to a detached shell.

    Everything typed goes to the shell, Ctrl-C too. At the beginning of a line, ~. detaches: the shell runs on for a
    minute, or with --keep for as long as the sandbox lives.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("a shell needs a terminal: use `roll-sandbox run -- COMMAND` without one.")
    wanted = _SandboxRequest(
        place=place, name=name, spec=_make_spec(image, memory_bytes), keep=keep, local=local, lifetime_s=lifetime_s
    )
    return asyncio.run(_shell(wanted, new))


async def _shell(wanted: _SandboxRequest, new: bool) -> int:
    from roll_sandbox.cli.terminal import attach_terminal, get_terminal_size
    from roll_sandbox.remote.connection import RemoteSandbox

    async with _open_sandbox(wanted) as here:
        running = [each for each in here.programs if each["terminal"] and each["end"] is None]
        click.secho(f"sandbox {here.name}   ({'exit ends it' if wanted.local else _LEAVE_HINT})", dim=True)
        if running and not new and isinstance(here.sandbox, RemoteSandbox):
            job = here.sandbox.reattach_program(running[-1])
        else:
            prompt = rf"\[\e[2m\]{here.name[:8]}\[\e[0m\] \w\$ "
            env = {"TERM": os.environ.get("TERM", "xterm"), "PS1": prompt}
            job = await here.sandbox.start(
                Command(argv=("sh", "-c", _SHELL), env=env, terminal=get_terminal_size(), wall_s=_DAY_S)
            )
        result = await attach_terminal(job)
        if result is None and not wanted.local:
            here.keep = True
            click.secho(f"detached; reattach with: roll-sandbox shell {here.name}", dim=True)
    return 0 if result is None else result.exit_code if result.exit_code is not None else 137


@asynccontextmanager
async def _open_sandbox(wanted: _SandboxRequest) -> AsyncIterator[_OpenSandbox]:
    """Run the body with the sandbox, which ends with the block unless it is to be kept."""
    if wanted.local:
        if wanted.keep or wanted.name:
            raise ConfigError("--keep and sandbox names need a service: a local sandbox ends with its command.")
        async with (
            SandboxManager("bubblewrap", spec=wanted.spec, warm=0) as manager,
            await manager.create() as sandbox,
        ):
            yield _OpenSandbox(sandbox, "here", False, [])
        return
    from roll_sandbox.wire import spec_to_json

    place, name, programs = wanted.place, wanted.name, []
    async with place.runtime() as runtime:
        if name is not None:
            name = await place.resolve_name(name)
            programs = (await runtime.inspect(name))["programs"]
        elif wanted.keep:
            made = await place.call(
                "POST", "/v1/sandboxes", {"spec": spec_to_json(wanted.spec), "lifetime_s": wanted.lifetime_s}
            )
            name = str(made["sandbox"])
        sandbox = await (
            runtime.attach(name, wanted.spec) if name else runtime.create(wanted.spec, lifetime_s=wanted.lifetime_s)
        )
        here = _OpenSandbox(sandbox, to_single_line(sandbox.name), keep=name is not None, programs=programs)
        try:
            yield here
        finally:
            if here.keep:
                sandbox.detach()
