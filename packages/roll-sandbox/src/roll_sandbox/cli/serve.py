"""`roll-sandbox serve` and `worker`: run a sandbox service, on one machine or many."""

from __future__ import annotations

from pathlib import Path

import click

from roll_sandbox.cli.common import ByteSize, database_option, make_missing_packages_error
from roll_sandbox.errors import ConfigError

__all__ = ["serve", "worker"]

_WARM_HELP = "Number of idle sandboxes to keep per type; by default chosen from the recent request rate."
_MAX_SANDBOXES_HELP = "Maximum number of sandboxes on this machine."
_AWAY_HELP = "Seconds after which the sandboxes of an unreachable worker are treated as lost."


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8741,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--certificate", type=click.Path(path_type=Path), default=None, help="TLS certificate, in PEM format.")
@click.option("--key", type=click.Path(path_type=Path), default=None, help="Key of the TLS certificate.")
@click.option("--insecure", is_flag=True, help="Allow connections from other machines without TLS.")
@database_option
@click.option("--audit", type=click.Path(path_type=Path), default=None, help="Append an audit log to this file.")
@click.option(
    "--runtime",
    default="bubblewrap",
    show_default=True,
    help="Isolation runtime of this machine; with none, sandboxes run only on workers that join.",
)
@click.option("--warm", type=click.IntRange(min=0), default=None, help=_WARM_HELP)
@click.option("--max-sandboxes", type=click.IntRange(min=1), default=2048, show_default=True, help=_MAX_SANDBOXES_HELP)
@click.option(
    "--mounts",
    multiple=True,
    metavar="DIR",
    help="Directory that sandboxes may mount read-only, including its subdirectories.",
)
@click.option(
    "--lifetime",
    "lifetime_s",
    type=float,
    default=3600.0,
    show_default=True,
    help="Default lifetime of a sandbox, in seconds.",
)
@click.option("--away", "away_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True, help=_AWAY_HELP)
@click.option(
    "--owner-sandboxes",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Maximum number of live sandboxes per owner.",
)
@click.option(
    "--owner-lifetime",
    type=float,
    default=86400.0,
    show_default=True,
    help="Maximum lifetime of a sandbox, in seconds.",
)
@click.option(
    "--max-message-bytes",
    type=click.IntRange(min=2**16),
    default=2**26,
    show_default=True,
    help="Maximum size of a message, in bytes.",
)
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
    away_s: float,
    owner_sandboxes: int,
    owner_lifetime: float,
    max_message_bytes: int,
) -> None:
    """Run a sandbox service. Clients connect with `roll_sandbox.connect(url, token)`."""
    try:
        from roll_sandbox.service.quotas import Quota
        from roll_sandbox.service.server import serve as serve_sandboxes
        from roll_sandbox.service.settings import Settings, get_default_database
    except ImportError as error:
        raise make_missing_packages_error(error) from None
    settings = Settings(
        database=database or get_default_database(),
        audit=audit,
        runtime=None if runtime == "none" else runtime,
        warm=warm,
        max_sandboxes=max_sandboxes,
        mounts=mounts,
        lifetime_s=lifetime_s,
        away_s=away_s,
        quota=Quota(sandboxes=owner_sandboxes, lifetime_s=owner_lifetime),
        max_message_bytes=max_message_bytes,
    )
    serve_sandboxes(settings, host, port, certificate=certificate, key=key, print_line=click.echo, insecure=insecure)


@click.command()
@click.option(
    "--join", "url", metavar="URL", required=True, help="URL of the service, as printed by `roll-sandbox serve`."
)
@click.option(
    "--token",
    envvar="ROLL_SANDBOX_TOKEN",
    default="",
    help="Token with the scope worker; can also be set with ROLL_SANDBOX_TOKEN.",
)
@click.option(
    "--name", default=None, help="Name of the worker; use the same name after a restart. By default a random name."
)
@click.option("--runtime", default="bubblewrap", show_default=True, help="Isolation runtime.")
@click.option("--warm", type=click.IntRange(min=0), default=None, help=_WARM_HELP)
@click.option("--max-sandboxes", type=click.IntRange(min=1), default=512, show_default=True, help=_MAX_SANDBOXES_HELP)
@click.option(
    "--mounts",
    multiple=True,
    metavar="DIR",
    help="Directory that sandboxes may mount read-only, including its subdirectories.",
)
@click.option(
    "--memory",
    "memory_bytes",
    type=ByteSize(),
    help="Maximum total memory limit of all sandboxes; a number without a unit is in bytes.",
)
@click.option(
    "--drain",
    "drain_s",
    type=float,
    default=25.0,
    show_default=True,
    help="Seconds to wait for sandboxes to end after SIGTERM.",
)
@click.option("--ca-file", default=None, help="File with CA certificates for verifying the service's certificate.")
def worker(
    url: str,
    token: str,
    name: str | None,
    runtime: str,
    warm: int | None,
    max_sandboxes: int,
    mounts: tuple[str, ...],
    memory_bytes: int | None,
    drain_s: float,
    ca_file: str | None,
) -> None:
    """Run sandboxes on this machine for a service on another machine.

    On SIGTERM, the worker accepts no new sandboxes, and exits when its last sandbox has ended. On a second SIGTERM, or
    on Ctrl-C, it exits immediately.
    """
    if not token:
        raise ConfigError(
            "a worker requires a token: pass --token or set ROLL_SANDBOX_TOKEN. `roll-sandbox token create OWNER "
            "--scope worker` creates one on the service's machine."
        )
    import asyncio
    import secrets

    from roll_sandbox.worker import run_worker

    for path in mounts:
        if not Path(path).is_dir():
            raise ConfigError(f"--mounts: directory '{path}' does not exist.")

    worker_name = name or f"worker-{secrets.token_hex(6)}"
    click.echo(f"Worker {worker_name} for {url}   (Ctrl-C ends it)")
    settings = {"name": worker_name, "capacity": max_sandboxes, "memory_bytes": memory_bytes, "ca_file": ca_file}
    asyncio.run(run_worker(url, token, runtime=runtime, warm=warm, mounts=mounts, drain_s=drain_s, **settings))
