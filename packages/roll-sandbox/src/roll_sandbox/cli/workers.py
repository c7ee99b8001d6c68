"""`roll-sandbox workers`, `drain` and `undrain`: the workers of a service."""

from __future__ import annotations

import asyncio
import time

import click

from roll_sandbox.cli.common import ServiceAddress, service_options

__all__ = ["drain", "undrain", "workers"]

_LOOK_AGAIN_S = 0.5


@click.command()
@service_options
def workers(place: ServiceAddress) -> None:
    """List the workers of a service."""
    rows = asyncio.run(place.call("GET", "/v1/workers"))
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
@click.option("--wait", is_flag=True, help="Wait until its last sandbox has ended.")
@service_options
def drain(place: ServiceAddress, name: str, wait: bool) -> None:
    """Give the worker NAME no new sandboxes. Its present ones go on until they end."""
    asyncio.run(_drain(place, name, wait))


async def _drain(place: ServiceAddress, name: str, wait: bool) -> None:
    row = await place.call("POST", f"/v1/workers/{name}/drain")
    while wait and row["sandboxes"]:
        await asyncio.sleep(_LOOK_AGAIN_S)
        rows = await place.call("GET", "/v1/workers")
        row = next((each for each in rows if each["worker"] == name), {"sandboxes": 0})  # it left with the last
    click.echo(f"{name} gets no new sandboxes, and has {row['sandboxes']}.")


@click.command()
@click.argument("name")
@service_options
def undrain(place: ServiceAddress, name: str) -> None:
    """Give the worker NAME new sandboxes again."""
    asyncio.run(place.call("POST", f"/v1/workers/{name}/undrain"))
    click.echo(f"{name} gets sandboxes again.")
