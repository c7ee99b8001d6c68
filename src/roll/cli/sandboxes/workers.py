"""`roll sandbox workers`, `drain` and `undrain`: the machines of a service."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

import click

from roll.errors import ConfigError

__all__ = ["drain", "undrain", "workers"]

_LOOK_AGAIN_S = 0.5


def _service(command: Callable[..., None]) -> Callable[..., None]:
    """Options that say which service, and who asks."""
    for option in (
        click.option("--ca-file", default=None, help="Certificates that the service's is checked with."),
        click.option("--token", envvar="ROLL_SANDBOX_TOKEN", default="", help="Of scope admin; or ROLL_SANDBOX_TOKEN."),
        click.option(
            "--url", envvar="ROLL_SANDBOX_URL", default="http://127.0.0.1:8741", show_default=True, metavar="URL"
        ),
    ):
        command = option(command)
    return command


@click.command()
@_service
def workers(url: str, token: str, ca_file: str | None) -> None:
    """List the workers of a service."""
    rows = asyncio.run(_ask("GET", "", url, token, ca_file))
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
@click.option("--wait", is_flag=True, help="Until its last sandbox has ended.")
@_service
def drain(name: str, wait: bool, url: str, token: str, ca_file: str | None) -> None:
    """Give the worker NAME no new sandboxes. Those that it has go on until they end."""
    asyncio.run(_drain(name, wait, url, token, ca_file))


async def _drain(name: str, wait: bool, url: str, token: str, ca_file: str | None) -> None:
    row = await _ask("POST", f"/{name}/drain", url, token, ca_file)
    while wait and row["sandboxes"]:
        await asyncio.sleep(_LOOK_AGAIN_S)
        rows = await _ask("GET", "", url, token, ca_file)
        row = next((each for each in rows if each["worker"] == name), {"sandboxes": 0})  # it has left, with the last
    click.echo(f"{name} gets no new sandboxes, and has {row['sandboxes']}.")


@click.command()
@click.argument("name")
@_service
def undrain(name: str, url: str, token: str, ca_file: str | None) -> None:
    """Give the worker NAME sandboxes again."""
    asyncio.run(_ask("POST", f"/{name}/undrain", url, token, ca_file))
    click.echo(f"{name} gets sandboxes again.")


async def _ask(method: str, path: str, url: str, token: str, ca_file: str | None) -> Any:
    """What the service answers.

    Raises:
        ConfigError: there is none, or it refuses.
    """
    import aiohttp

    context = ssl.create_default_context(cafile=ca_file) if ca_file else True
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.request(method, f"{url.rstrip('/')}/v1/workers{path}", ssl=context) as answer,
        ):
            said = await answer.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ConfigError(f"no sandbox service answers at '{url}' ({error}): say where it is with `--url`.") from None
    if answer.status >= 400:
        raise ConfigError(f"the sandbox service at {url} refuses: {said.get('message', answer.status)}")
    return said
