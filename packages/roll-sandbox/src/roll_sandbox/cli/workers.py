"""`roll-sandbox workers`, `drain` and `undrain`: manage the workers of a service."""

from __future__ import annotations

import asyncio
import time

import click

from roll_sandbox.cli.common import ServiceAddress, service_options

__all__ = ["drain", "undrain", "workers"]

_POLL_S = 0.5


@click.command()
@service_options
def workers(service: ServiceAddress) -> None:
    """List the workers of a service."""
    rows = asyncio.run(service.call("GET", "/v1/workers"))
    click.echo(f"{'WORKER':28} {'STATE':9} {'SANDBOXES':>11} {'LOAD':>5} {'CORES':>5} {'FREE MEMORY':>12}  LAST SEEN")
    for row in rows:
        free = "" if row["free_bytes"] is None else f"{row['free_bytes'] / 2**30:.1f} GiB"
        held = f"{row['sandboxes']}/{row['capacity']}"
        seen = f"{max(0.0, time.time() - row['seen']):.0f} s ago" if row["seen"] else "never"
        click.echo(
            f"{row['worker']:28} {row['state']:9} {held:>11} {row['load']:>5.0%} {row['cores']:>5} {free:>12}  {seen}"
        )


@click.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Wait until the worker's last sandbox has ended.")
@service_options
def drain(service: ServiceAddress, name: str, wait: bool) -> None:
    """Start no new sandboxes on the worker NAME. Its current sandboxes run until they end."""
    asyncio.run(_drain_worker(service, name, wait))


async def _drain_worker(service: ServiceAddress, name: str, wait: bool) -> None:
    row = await service.call("POST", f"/v1/workers/{name}/drain")
    while wait and row["sandboxes"]:
        await asyncio.sleep(_POLL_S)
        rows = await service.call("GET", "/v1/workers")
        row = next((each for each in rows if each["worker"] == name), {"sandboxes": 0})  # no row: the worker has left
    click.echo(f"{name} receives no new sandboxes; sandboxes still running: {row['sandboxes']}.")


@click.command()
@click.argument("name")
@service_options
def undrain(service: ServiceAddress, name: str) -> None:
    """Start new sandboxes on the worker NAME again."""
    asyncio.run(service.call("POST", f"/v1/workers/{name}/undrain"))
    click.echo(f"{name} receives new sandboxes again.")
