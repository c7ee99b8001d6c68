"""`roll-sandbox image`: the images that sandboxes of this machine may have."""

from __future__ import annotations

import time
from pathlib import Path

import click

from roll_sandbox.images import ImageCache, parse_reference

__all__ = ["image"]

_budget = click.option(
    "--budget",
    "budget_gb",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="GB",
    help="Disk budget of all images; by default ROLL_SANDBOX_IMAGES_BYTES, or 20 GiB.",
)


@click.group()
def image() -> None:
    """Manage the images that sandboxes of this machine may have: `SandboxSpec(image=NAME)`."""


@image.command()
@click.argument("name")
@click.option("--as", "own", metavar="NAME", default=None, help="Local name of the image; by default NAME.")
@click.option("--insecure", is_flag=True, help="Connect to the registry without TLS.")
@_budget
def pull(name: str, own: str | None, insecure: bool, budget_gb: float | None) -> None:
    """Pull the image NAME, REGISTRY/REPOSITORY:TAG or …@sha256:…, from its registry."""
    from roll_sandbox.images.registry import RegistrySource

    own = str(parse_reference(own or name))
    found = _open_cache(budget_gb).add(own, RegistrySource(parse_reference(name), insecure=insecure))
    click.echo(f"{own}  {found.digest}  {_format_size(found.size_bytes)}")


@image.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--tag", default=None, help="Tag of the image, if PATH has several.")
@_budget
def import_image(path: Path, name: str, tag: str | None, budget_gb: float | None) -> None:
    """Import the image at PATH: an OCI layout, an archive of one or of `docker save`, or a root directory."""
    from roll_sandbox.images.sources import open_source

    with open_source(path, tag=tag) as source:
        found = _open_cache(budget_gb).add(name, source)
    click.echo(f"{parse_reference(name)}  {found.digest}  {_format_size(found.size_bytes)}")


@image.command("list")
def list_images() -> None:
    """List all images, most recently used first."""
    for entry in ImageCache().list():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
        state = "in use" if entry.held else ""
        names = " ".join(entry.names) or "-"
        click.echo(f"{entry.image.digest[7:19]}  {_format_size(entry.image.size_bytes):>9}  {used}  {state:6}  {names}")


@image.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove the image NAME, and its layers unless another image has them."""
    ImageCache().remove(name)


def _open_cache(budget_gb: float | None) -> ImageCache:
    return ImageCache(budget_bytes=None if budget_gb is None else int(budget_gb * 1e9))


def _format_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
