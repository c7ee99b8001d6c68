"""`roll sandbox`: a service that runs sandboxes for others, and its tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roll.errors import ConfigError
from roll.version import install_extra

if TYPE_CHECKING:
    from roll.sandbox.service.tokens import Tokens

__all__ = ["sandbox"]

_database = click.option(
    "--database", metavar="URL", default=None, help="As SQLAlchemy has them; else a SQLite file of this user."
)


@click.group()
def sandbox() -> None:
    """Run sandboxes for others, as a service.

    \b
    roll sandbox token create trainer      a token for an owner named trainer; it is shown once
    roll sandbox serve                     answer on this machine
    """


@sandbox.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=8741, show_default=True, help="0 takes a free one.")
@click.option("--certificate", type=click.Path(path_type=Path), default=None, help="TLS: in PEM.")
@click.option("--key", type=click.Path(path_type=Path), default=None, help="TLS: the key of the certificate.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS.")
@_database
@click.option("--audit", type=click.Path(path_type=Path), default=None, help="Append who did what to this file.")
@click.option("--runtime", default="bubblewrap", show_default=True, help="What isolates; none: workers join.")
@click.option("--warm", type=click.IntRange(min=0), default=None, help="Sandboxes to start in advance.")
@click.option("--max-sandboxes", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--mounts", multiple=True, metavar="DIR", help="Let sandboxes mount what is below, read-only.")
@click.option("--lifetime", "lifetime_s", type=float, default=3600.0, show_default=True, help="Seconds, by default.")
@click.option("--owner-sandboxes", type=click.IntRange(min=1), default=1024, show_default=True, help="Of one owner.")
@click.option("--owner-lifetime", type=float, default=86400.0, show_default=True, help="Seconds, at most.")
@click.option("--max-message-bytes", type=click.IntRange(min=2**16), default=2**26, show_default=True)
def serve(
    host: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    insecure: bool,
    database: str | None,
    audit: Path | None,
    runtime: str,
    warm: int | None,
    max_sandboxes: int,
    mounts: tuple[str, ...],
    lifetime_s: float,
    owner_sandboxes: int,
    owner_lifetime: float,
    max_message_bytes: int,
) -> None:
    """Answer clients: `roll.sandbox.connect(url, token)`."""
    try:
        from roll.sandbox.service.quotas import Quota
        from roll.sandbox.service.serving import serve as serve_sandboxes
        from roll.sandbox.service.settings import Settings, default_database
    except ImportError as error:
        raise _missing(error) from None
    settings = Settings(
        database=database or default_database(),
        audit=audit,
        runtime=None if runtime == "none" else runtime,
        warm=warm,
        max_sandboxes=max_sandboxes,
        mounts=mounts,
        lifetime_s=lifetime_s,
        quota=Quota(sandboxes=owner_sandboxes, lifetime_s=owner_lifetime),
        max_message_bytes=max_message_bytes,
    )
    serve_sandboxes(settings, host, port, certificate=certificate, key=key, say=click.echo, insecure=insecure)


@sandbox.command()
@click.option("--join", "url", metavar="URL", required=True, help="Of the service, as `roll sandbox serve` printed it.")
@click.option("--token", envvar="ROLL_SANDBOX_TOKEN", default="", help="Of scope worker; or ROLL_SANDBOX_TOKEN.")
@click.option("--name", default=None, help="By which the service knows it again; else a new one.")
@click.option("--runtime", default="bubblewrap", show_default=True, help="What isolates.")
@click.option("--warm", type=click.IntRange(min=0), default=None, help="Sandboxes to start in advance.")
@click.option("--max-sandboxes", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--mounts", multiple=True, metavar="DIR", help="Let sandboxes mount what is below, read-only.")
@click.option("--ca-file", default=None, help="Certificates that the service's is checked with.")
def worker(
    url: str,
    token: str,
    name: str | None,
    runtime: str,
    warm: int | None,
    max_sandboxes: int,
    mounts: tuple[str, ...],
    ca_file: str | None,
) -> None:
    """Run sandboxes on this machine for a service elsewhere."""
    if not token:
        raise ConfigError(
            "a worker needs a token: --token, or ROLL_SANDBOX_TOKEN in the environment. "
            "`roll sandbox token create OWNER --scope worker` makes one where the service is."
        )
    import asyncio
    import secrets

    from roll.sandbox import SandboxManager
    from roll.sandbox.worker import Joined, Worker

    async def work() -> None:
        async with SandboxManager(runtime, warm=warm, max_sandboxes=max_sandboxes) as manager:
            held = Worker(manager, mounts=mounts)
            known = name or f"worker-{secrets.token_hex(6)}"
            click.echo(f"Worker {known} for {url}   (Ctrl-C ends it)")
            try:
                await Joined(held, url, token, name=known, capacity=max_sandboxes, ca_file=ca_file).serve()
            finally:
                await held.close()

    asyncio.run(work())


@sandbox.group()
def token() -> None:
    """Who may use a service. Tokens are kept as digests: each is shown once, when it is made."""


@token.command("create")
@click.argument("owner")
@click.option(
    "--scope", "scopes", multiple=True, default=("read", "run"), show_default=True, help="Also admin, worker."
)
@click.option("--days", type=float, default=None, help="How long it is good; else until it is revoked.")
@click.option("--note", default="", help="What it is for.")
@_database
def create_token(owner: str, scopes: tuple[str, ...], days: float | None, note: str, database: str | None) -> None:
    """Make a token of OWNER and print it."""
    lifetime_s = None if days is None else days * 86400
    click.echo(_tokens(database).create(owner, scopes, lifetime_s=lifetime_s, note=note))


@token.command("list")
@_database
def list_tokens(database: str | None) -> None:
    """Show all tokens, without their secrets."""
    now = time.time()
    for row in _tokens(database).list():
        state = "revoked" if row["revoked"] else "expired" if row["expires"] and row["expires"] <= now else "good"
        until = time.strftime("until %Y-%m-%d %H:%M", time.localtime(row["expires"])) if row["expires"] else ""
        click.echo(f"{row['id']}  {row['owner']:20} {state:8} {row['scopes']:20} {until:22} {row['note']}".rstrip())


@token.command("rotate")
@click.argument("id")
@click.option("--grace", "grace_s", type=click.FloatRange(min=0), default=0.0, help="Seconds for which ID stays good.")
@_database
def rotate_token(id: str, grace_s: float, database: str | None) -> None:
    """Make another token in place of ID and print it."""
    click.echo(_tokens(database).rotate(id, grace_s=grace_s))


@token.command("revoke")
@click.argument("id")
@_database
def revoke_token(id: str, database: str | None) -> None:
    """Answer nothing to ID any more."""
    _tokens(database).revoke(id)


def _tokens(database: str | None) -> Tokens:
    try:
        from roll.sandbox.service.settings import default_database
        from roll.sandbox.service.store import Store
        from roll.sandbox.service.tokens import Tokens
    except ImportError as error:
        raise _missing(error) from None
    store = Store(database or default_database())
    store.migrate()
    return Tokens(store)


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"`roll sandbox` needs packages that are not installed ({error}): {install_extra('sandbox')}")
