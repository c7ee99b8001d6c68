"""`roll-sandbox ls`, `logs`, `stop` and `top`: show and stop an owner's sandboxes in a service."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from roll_sandbox.cli.common import SandboxRow, ServiceAddress, format_age, format_size, service_options, to_single_line
from roll_sandbox.errors import ConfigError, RollSandboxError
from roll_sandbox.sanitize import escape_control_chars

if TYPE_CHECKING:
    from roll_sandbox.remote import RemoteRuntime

__all__ = ["logs", "ls", "stop", "top"]

_MAX_CONCURRENT = 32
_MIN_TABLE_ROWS = 5


@click.command()
@service_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(service: ServiceAddress, as_json: bool) -> None:
    """List your sandboxes, oldest first."""
    sandboxes = asyncio.run(service.list_sandboxes())
    if as_json:
        click.echo(json.dumps([each.model_dump() for each in sandboxes], indent=2))
        return
    now = time.time()
    rows = [
        (
            each.sandbox,
            each.state,
            format_age(each.created),
            _format_remaining(each.expires - now),
            each.programs,
            each.worker,
        )
        for each in sandboxes
    ]
    click.echo(_format_table(("SANDBOX", "STATE", "AGE", "LEFT", "PROGRAMS", "WORKER"), rows))


@click.command()
@service_options
@click.argument("name")
@click.option(
    "--bytes",
    "max_bytes",
    type=click.IntRange(1, 2**22),
    default=2**14,
    show_default=True,
    help="Maximum number of output bytes per program.",
)
def logs(service: ServiceAddress, name: str, max_bytes: int) -> None:
    """Show the output of the latest programs in the sandbox whose name is or begins with NAME."""

    async def inspect_sandbox() -> dict[str, Any]:
        async with service.open_runtime() as runtime:
            return await runtime.inspect(await service.resolve_name(name), output_bytes=max_bytes)

    for program in asyncio.run(inspect_sandbox())["programs"]:
        began = time.strftime("%H:%M:%S", time.localtime(program["began"]))
        click.secho(f"── {to_single_line(program['words'])}  ({began}, {_format_end(program['end'])})", dim=True)
        text = program["output"].decode(errors="replace")
        click.echo(escape_control_chars(text.replace("\r\n", "\n")), nl=bool(text) and not text.endswith("\n"))


@click.command()
@service_options
@click.argument("names", nargs=-1)
@click.option("--all", "stop_all_sandboxes", is_flag=True, help="Stop all of your sandboxes.")
def stop(service: ServiceAddress, names: tuple[str, ...], stop_all_sandboxes: bool) -> None:
    """Stop sandboxes by name or by the beginning of their name."""
    if bool(names) == stop_all_sandboxes:
        raise ConfigError("no sandbox specified: pass the names of the sandboxes to stop, or --all.")

    async def stop_all() -> list[str]:
        selected = [each.sandbox for each in await service.list_sandboxes()] if stop_all_sandboxes else []
        selected += [await service.resolve_name(name) for name in names]
        slots = asyncio.Semaphore(_MAX_CONCURRENT)

        async def stop_one(name: str) -> None:
            async with slots:
                await service.call("DELETE", f"/v1/sandboxes/{name}")

        await asyncio.gather(*(stop_one(name) for name in dict.fromkeys(selected)))
        return selected

    for name in asyncio.run(stop_all()):
        click.echo(to_single_line(name))


@click.command()
@service_options
@click.option("--once", is_flag=True, help="Show the table once; this is the default if the output is not a terminal.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between updates.",
)
def top(service: ServiceAddress, once: bool, every_s: float) -> None:
    """Show the resource usage of your sandboxes, busiest first, until Ctrl-C."""
    if once or not sys.stdout.isatty():
        click.echo(asyncio.run(_load_top_table(service)))
        return
    try:
        asyncio.run(_show_repeatedly(service, every_s))
    except KeyboardInterrupt:
        return


async def _load_top_table(service: ServiceAddress) -> str:
    async with service.open_runtime() as runtime:
        return _format_top(await _load_usage(service, runtime), {}, 0.0, max_rows=None)


async def _show_repeatedly(service: ServiceAddress, every_s: float) -> None:
    from rich.console import Console, ConsoleDimensions
    from rich.live import Live
    from rich.text import Text

    from roll_sandbox.cli.terminal import get_terminal_size

    before: dict[str, float] = {}
    then = time.monotonic()
    async with service.open_runtime() as runtime:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                sandboxes, now = await _load_usage(service, runtime), time.monotonic()
                rows, columns = get_terminal_size()
                # rich prefers LINES and COLUMNS, which do not change when the terminal is resized.
                live.console.size = ConsoleDimensions(columns, rows)
                table = _format_top(sandboxes, before, now - then, max_rows=max(_MIN_TABLE_ROWS, rows - 3))
                live.update(Text(table, no_wrap=True), refresh=True)
                before, then = {each.row.sandbox: each.cpu_s for each in sandboxes}, now
                await asyncio.sleep(every_s)


@dataclass(frozen=True)
class _SandboxUsage:
    """A sandbox and its resource usage; `running` contains the first words of each running program."""

    row: SandboxRow
    state: str
    cpu_s: float = 0.0
    memory_bytes: int = 0
    running: tuple[str, ...] = ()


async def _load_usage(service: ServiceAddress, runtime: RemoteRuntime) -> list[_SandboxUsage]:
    """Return all sandboxes with their usage; a sandbox that does not answer has usage 0 and the state `unknown`."""
    slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def load_row_usage(row: SandboxRow) -> _SandboxUsage:
        if row.state != "running":
            return _SandboxUsage(row, row.state)
        async with slots:
            try:
                answer = await runtime.inspect(row.sandbox)
            except RollSandboxError:
                return _SandboxUsage(row, "unknown")
        running = tuple(program["words"] for program in answer["programs"] if program["end"] is None)
        return _SandboxUsage(row, row.state, answer["cpu_s"], answer["memory_bytes"], running)

    return await asyncio.gather(*(load_row_usage(row) for row in await service.list_sandboxes()))


def _format_top(
    sandboxes: Sequence[_SandboxUsage], last_cpu_s: dict[str, float], interval_s: float, max_rows: int | None
) -> str:
    """Return the table of `top`, busiest sandboxes first.

    Args:
        sandboxes: all sandboxes.
        last_cpu_s: CPU seconds of each sandbox in the last table; the CPU column shows the percentage of a core used
            since then.
        interval_s: seconds since the last table.
        max_rows: maximum number of rows; `None` for no limit.
    """

    def compute_cpu_usage(sandbox: _SandboxUsage) -> float:
        return (
            (sandbox.cpu_s - last_cpu_s[sandbox.row.sandbox]) / interval_s if sandbox.row.sandbox in last_cpu_s else 0.0
        )

    order = sorted(sandboxes, key=lambda each: (-compute_cpu_usage(each), -each.cpu_s, each.row.sandbox))
    rows = [
        (
            each.row.sandbox,
            each.state,
            f"{100 * compute_cpu_usage(each):.0f}" if each.row.sandbox in last_cpu_s else "–",
            f"{each.cpu_s:.1f}",
            format_size(each.memory_bytes),
            len(each.running),
            format_age(each.row.created),
            each.running[-1][:60] if each.running else "",
        )
        for each in order[:max_rows]
    ]
    all_memory = format_size(sum(each.memory_bytes for each in sandboxes))
    title = (
        f"{len(sandboxes)} sandboxes · {sum(len(each.running) for each in sandboxes)} programs · {all_memory} of memory"
    )
    columns = ("SANDBOX", "STATE", "CPU %", "CPU s", "MEMORY", "PROGRAMS", "AGE", "LATEST")
    return f"{title}\n{_format_table(columns, rows)}"


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with columns as wide as needed; control characters in the values are escaped."""
    cells = [list(columns), *([to_single_line(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _format_remaining(seconds: float) -> str:
    return f"{seconds / 60:.0f}m" if seconds >= 120 else f"{max(0.0, seconds):.0f}s"


def _format_end(end: dict[str, Any] | None) -> str:
    if end is None:
        return "runs"
    if "error" in end:
        return to_single_line(end["error"])
    limits = ", ".join(map(to_single_line, end.get("limits", ())))
    return limits or f"exit code {end.get('code')}"
