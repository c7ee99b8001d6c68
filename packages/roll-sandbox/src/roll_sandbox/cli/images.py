"""`roll-sandbox image`: manages the images for sandboxes on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import click

from roll_sandbox.images import ImageCache, parse_reference

__all__ = ["image"]

_budget_option = click.option(
    "--budget",
    "budget_gb",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="GB",
    help="Disk budget of all images; by default ROLL_SANDBOX_IMAGES_BYTES, or 20 GiB.",
)


@click.group()
def image() -> None:
    """Manage the images for sandboxes on this machine: `SandboxSpec(image=NAME)`."""


@image.command()
@click.argument("name")
@click.option("--as", "local_name", metavar="NAME", default=None, help="Local name of the image; by default NAME.")
@click.option("--insecure", is_flag=True, help="Connect to the registry without TLS.")
@_budget_option
def pull(name: str, local_name: str | None, insecure: bool, budget_gb: float | None) -> None:
    """Pull the image NAME, REGISTRY/REPOSITORY:TAG or …@sha256:…, from its registry."""
    from roll_sandbox.images.registry import RegistrySource

    local_name = str(parse_reference(local_name or name))
    found = _open_cache(budget_gb).add(local_name, RegistrySource(parse_reference(name), insecure=insecure))
    click.echo(f"{local_name}  {found.digest}  {_format_size(found.size_bytes)}")


@image.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--tag", default=None, help="Tag of the image, if PATH contains several images.")
@_budget_option
def import_image(path: Path, name: str, tag: str | None, budget_gb: float | None) -> None:
    """Import the image at PATH: an OCI layout or its archive, an archive of `docker save`, or a root file system."""
    from roll_sandbox.images.sources import open_source

    with open_source(path, tag=tag) as source:
        found = _open_cache(budget_gb).add(name, source)
    click.echo(f"{parse_reference(name)}  {found.digest}  {_format_size(found.size_bytes)}")


@image.command("list")
def list_images() -> None:
    """List all images, most recently used first."""
    for entry in ImageCache().list():
        used_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
        state = "in use" if entry.in_use else ""
        names = " ".join(entry.names) or "-"
        click.echo(
            f"{entry.image.digest[7:19]}  {_format_size(entry.image.size_bytes):>9}  {used_at}  {state:6}  {names}"
        )


@image.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove the image NAME, and the layers that only this image uses."""
    ImageCache().remove(name)


def _open_cache(budget_gb: float | None) -> ImageCache:
    return ImageCache(budget_bytes=None if budget_gb is None else int(budget_gb * 1e9))


def _format_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
