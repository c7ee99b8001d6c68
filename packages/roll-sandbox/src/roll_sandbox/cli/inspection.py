"""`roll-sandbox ls`, `logs`, `stop` and `top`: an owner's sandboxes in a service."""

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
_SMALLEST_ROWS = 5


@click.command()
@service_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(place: ServiceAddress, as_json: bool) -> None:
    """List your sandboxes, oldest first."""
    found = asyncio.run(place.sandboxes())
    if as_json:
        click.echo(json.dumps([each.model_dump() for each in found], indent=2))
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
        for each in found
    ]
    click.echo(_format_table(("SANDBOX", "STATE", "AGE", "LEFT", "PROGRAMS", "WORKER"), rows))


@click.command()
@service_options
@click.argument("name")
@click.option(
    "--bytes", "most", type=click.IntRange(1, 2**22), default=2**14, show_default=True, help="Bytes per program."
)
def logs(place: ServiceAddress, name: str, most: int) -> None:
    """Show the output of the latest programs of sandbox NAME, which may be the beginning of its name."""

    async def ask() -> dict[str, Any]:
        async with place.runtime() as runtime:
            return await runtime.inspect(await place.resolve_name(name), output_bytes=most)

    for program in asyncio.run(ask())["programs"]:
        began = time.strftime("%H:%M:%S", time.localtime(program["began"]))
        click.secho(f"── {to_single_line(program['words'])}  ({began}, {_format_end(program['end'])})", dim=True)
        text = program["output"].decode(errors="replace")
        click.echo(escape_control_chars(text.replace("\r\n", "\n")), nl=bool(text) and not text.endswith("\n"))


@click.command()
@service_options
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Stop all of your sandboxes.")
def stop(place: ServiceAddress, names: tuple[str, ...], everything: bool) -> None:
    """End sandboxes and all that runs in them, by name or the beginning of a name."""
    if bool(names) == everything:
        raise ConfigError("name the sandboxes to stop, or set --all.")

    async def end() -> list[str]:
        chosen = [each.sandbox for each in await place.sandboxes()] if everything else []
        chosen += [await place.resolve_name(name) for name in names]
        places = asyncio.Semaphore(_MAX_CONCURRENT)

        async def one(name: str) -> None:
            async with places:
                await place.call("DELETE", f"/v1/sandboxes/{name}")

        await asyncio.gather(*(one(name) for name in dict.fromkeys(chosen)))
        return chosen

    for name in asyncio.run(end()):
        click.echo(to_single_line(name))


@click.command()
@service_options
@click.option("--once", is_flag=True, help="Show it once; the default if the output is not a terminal.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between updates.",
)
def top(place: ServiceAddress, once: bool, every_s: float) -> None:
    """Show what your sandboxes use, busiest first, until Ctrl-C."""
    if once or not sys.stdout.isatty():
        click.echo(asyncio.run(_once(place)))
        return
    try:
        asyncio.run(_watch(place, every_s))
    except KeyboardInterrupt:
        return


async def _once(place: ServiceAddress) -> str:
    async with place.runtime() as runtime:
        return _format_top(await _load_usage(place, runtime), {}, 0.0, most=None)


async def _watch(place: ServiceAddress, every_s: float) -> None:
    from rich.console import Console, ConsoleDimensions
    from rich.live import Live
    from rich.text import Text

    from roll_sandbox.cli.terminal import get_terminal_size

    before: dict[str, float] = {}
    then = time.monotonic()
    async with place.runtime() as runtime:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                found, now = await _load_usage(place, runtime), time.monotonic()
                rows, columns = get_terminal_size()
                live.console.size = ConsoleDimensions(columns, rows)
                table = _format_top(found, before, now - then, most=max(_SMALLEST_ROWS, rows - 3))
                live.update(Text(table, no_wrap=True), refresh=True)
                before, then = {each.row.sandbox: each.cpu_s for each in found}, now
                await asyncio.sleep(every_s)


@dataclass(frozen=True)
class _SandboxUsage:
    """A sandbox with what it uses; `running` has the first words of its programs."""

    row: SandboxRow
    state: str
    cpu_s: float = 0.0
    memory_bytes: int = 0
    running: tuple[str, ...] = ()


async def _load_usage(place: ServiceAddress, runtime: RemoteRuntime) -> list[_SandboxUsage]:
    """Return every sandbox with what it uses; zeros if it has just ended or its worker is away."""
    places = asyncio.Semaphore(_MAX_CONCURRENT)

    async def one(row: SandboxRow) -> _SandboxUsage:
        if row.state != "running":
            return _SandboxUsage(row, row.state)
        async with places:
            try:
                looked = await runtime.inspect(row.sandbox)
            except RollSandboxError:
                return _SandboxUsage(row, "unknown")
        running = tuple(program["words"] for program in looked["programs"] if program["end"] is None)
        return _SandboxUsage(row, row.state, looked["cpu_s"], looked["memory_bytes"], running)

    return await asyncio.gather(*(one(row) for row in await place.sandboxes()))


def _format_top(found: Sequence[_SandboxUsage], before: dict[str, float], passed_s: float, most: int | None) -> str:
    """Return the table of `top`, with the CPU share of one core since the last table."""

    def share(each: _SandboxUsage) -> float:
        return (each.cpu_s - before[each.row.sandbox]) / passed_s if each.row.sandbox in before else 0.0

    order = sorted(found, key=lambda each: (-share(each), -each.cpu_s, each.row.sandbox))
    rows = [
        (
            each.row.sandbox,
            each.state,
            f"{100 * share(each):.0f}" if each.row.sandbox in before else "–",
            f"{each.cpu_s:.1f}",
            format_size(each.memory_bytes),
            len(each.running),
            format_age(each.row.created),
            each.running[-1][:60] if each.running else "",
        )
        for each in order[:most]
    ]
    all_memory = format_size(sum(each.memory_bytes for each in found))
    title = f"{len(found)} sandboxes · {sum(len(each.running) for each in found)} programs · {all_memory} of memory"
    columns = ("SANDBOX", "STATE", "CPU %", "CPU s", "MEMORY", "PROGRAMS", "AGE", "LATEST")
    return f"{title}\n{_format_table(columns, rows)}"


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table whose columns are as wide as needed; untrusted values are made harmless."""
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
