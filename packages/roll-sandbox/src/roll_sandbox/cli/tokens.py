"""`roll-sandbox token`: manages the tokens of a service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from roll_sandbox.cli.common import database_option, open_store, to_single_line

if TYPE_CHECKING:
    from roll_sandbox.service.tokens import TokenStore

__all__ = ["token"]


@click.group()
def token() -> None:
    """Manage the tokens of a service. Only digests are stored: a token is shown once, when it is created."""


@token.command("create")
@click.argument("owner")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    default=("read", "run"),
    show_default=True,
    help="Scope of the token: read, run, admin or worker; may be repeated.",
)
@click.option(
    "--days", type=float, default=None, help="Lifetime in days; by default the token is valid until it is revoked."
)
@click.option("--note", default="", help="Note that `token list` shows.")
@database_option
def create_token(owner: str, scopes: tuple[str, ...], days: float | None, note: str, database: str | None) -> None:
    """Create a token for OWNER and print it."""
    lifetime_s = None if days is None else days * 86400
    click.echo(_open_tokens(database).create(owner, scopes, lifetime_s=lifetime_s, note=note))


@token.command("list")
@database_option
def list_tokens(database: str | None) -> None:
    """Show all tokens, without their secrets."""
    now = time.time()
    for row in _open_tokens(database).list():
        state = "revoked" if row.revoked else "expired" if row.expires and row.expires <= now else "valid"
        until = time.strftime("until %Y-%m-%d %H:%M", time.localtime(row.expires)) if row.expires else ""
        click.echo(f"{row.id}  {row.owner:20} {state:8} {row.scopes:20} {until:22} {to_single_line(row.note)}".rstrip())


@token.command("rotate")
@click.argument("id")
@click.option(
    "--grace", "grace_s", type=click.FloatRange(min=0), default=0.0, help="Seconds for which the token ID stays valid."
)
@database_option
def rotate_token(id: str, grace_s: float, database: str | None) -> None:
    """Create a token that replaces the token ID, and print it."""
    click.echo(_open_tokens(database).rotate(id, grace_s=grace_s))


@token.command("revoke")
@click.argument("id")
@database_option
def revoke_token(id: str, database: str | None) -> None:
    """Revoke the token ID."""
    _open_tokens(database).revoke(id)


def _open_tokens(database: str | None) -> TokenStore:
    store = open_store(database)
    from roll_sandbox.service.tokens import TokenStore

    return TokenStore(store)
