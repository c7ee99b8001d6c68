"""Options and helpers that the commands of `roll-sandbox` share."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel, ConfigDict

from roll_sandbox.errors import ConfigError
from roll_sandbox.sanitize import escape_control_chars
from roll_sandbox.version import DISTRIBUTION

if TYPE_CHECKING:
    from roll_sandbox.remote import RemoteRuntime
    from roll_sandbox.service.store import Store

__all__ = [
    "ByteSize",
    "SandboxRow",
    "ServiceAddress",
    "database_option",
    "format_age",
    "format_size",
    "make_missing_packages_error",
    "open_store",
    "service_options",
    "to_single_line",
]

_PAGE_SIZE = 1000
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB)?")
_BYTES_PER_UNIT = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DEFAULT_URL = "http://127.0.0.1:8741"

database_option = click.option(
    "--database",
    metavar="URL",
    default=None,
    help="SQLAlchemy database URL; by default a SQLite file of the current user.",
)


class ByteSize(click.ParamType):
    """Parameter type for sizes of at least `min_size` bytes, such as 8GiB; numbers without a unit are multiplied by
    `unit`.
    """

    name = "size"

    def __init__(self, *, unit: int = 1, min_size: int = 1) -> None:
        self._unit, self._min_size = unit, min_size

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE_PATTERN.fullmatch(value)
        bytes_ = int(float(match[1]) * _BYTES_PER_UNIT.get(match[2], self._unit)) if match else 0
        if bytes_ < self._min_size:
            min_size = f" of at least {self._min_size >> 20}MiB" if self._min_size > 1 else ""
            self.fail(f"must be a size{min_size} such as 8GiB, got '{value[:40]}'.", param, ctx)
        return bytes_


class SandboxRow(BaseModel):
    """An entry of a service's list of sandboxes. A newer service may send further fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    sandbox: str
    state: str
    created: float
    expires: float
    worker: str
    programs: int


@dataclass(frozen=True, kw_only=True)
class ServiceAddress:
    """The address of a service, and the token for it."""

    url: str
    token: str
    ca_file: str | None

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call a route of the service, and return its JSON answer; see `remote.calls.call_service`.

        Raises:
            ConfigError: the service rejects the request.
        """
        from roll_sandbox.errors import SandboxAccessError, SandboxRequestError, UnknownSandboxError
        from roll_sandbox.remote.calls import call_service

        try:
            return await call_service(self.url, self._get_token(), method, path, body=body, ca_file=self.ca_file)
        except (SandboxAccessError, SandboxRequestError, UnknownSandboxError) as error:
            raise ConfigError(str(error)) from None

    @asynccontextmanager
    async def open_runtime(self) -> AsyncIterator[RemoteRuntime]:
        """Yield a connection to the service. At the end, the connection's sandboxes are ended, except detached
        sandboxes.
        """
        from roll_sandbox.remote import RemoteRuntime

        runtime = RemoteRuntime(self.url, self._get_token(), ca_file=self.ca_file)
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.close()

    async def list_sandboxes(self) -> list[SandboxRow]:
        """Return all sandboxes of the token's owner, oldest first."""
        rows: list[SandboxRow] = []
        after, full = "", True
        while full:
            page = await self.call("GET", f"/v1/sandboxes?limit={_PAGE_SIZE}{after}")
            rows += map(SandboxRow.model_validate, page)
            full = len(page) == _PAGE_SIZE
            after = f"&after={rows[-1].sandbox}" if rows else ""
        return sorted(rows, key=lambda each: (each.created, each.sandbox))

    async def resolve_name(self, prefix: str) -> str:
        """Return the full name of the sandbox whose name is or begins with `prefix`.

        Raises:
            ConfigError: no sandbox or more than one sandbox has such a name.
        """
        names = [each.sandbox for each in await self.list_sandboxes()]
        matches = [name for name in names if name == prefix] or [name for name in names if name.startswith(prefix)]
        if len(matches) == 1:
            return matches[0]
        problem = f"matches {len(matches)} sandboxes" if matches else "does not match any of your sandboxes"
        raise ConfigError(f"'{to_single_line(prefix)}' {problem}: `roll-sandbox ls` lists the sandboxes.")

    def _get_token(self) -> str:
        if not self.token:
            raise ConfigError(
                f"the sandbox service at {self.url} requires a token: pass --token or set ROLL_SANDBOX_TOKEN. "
                "`roll-sandbox token create OWNER` creates one on the service's machine."
            )
        return self.token


def service_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a service; the command receives the service as the argument `service`."""

    @click.option(
        "--url",
        envvar="ROLL_SANDBOX_URL",
        default=DEFAULT_URL,
        show_default=True,
        help="URL of the service, as printed by `roll-sandbox serve`; can also be set with ROLL_SANDBOX_URL.",
    )
    @click.option(
        "--token",
        envvar="ROLL_SANDBOX_TOKEN",
        default="",
        help="Token of the service; can also be set with ROLL_SANDBOX_TOKEN.",
    )
    @click.option("--ca-file", default=None, help="File with CA certificates for verifying the service's certificate.")
    @wraps(command)
    def wrapped(*arguments: Any, url: str, token: str, ca_file: str | None, **options: Any) -> Any:
        return command(*arguments, service=ServiceAddress(url=url.rstrip("/"), token=token, ca_file=ca_file), **options)

    return wrapped


def to_single_line(value: object) -> str:
    """Convert an untrusted value to one line, with control characters escaped."""
    return " ".join(escape_control_chars(str(value)).split())


def format_age(since: float) -> str:
    """Format the time since `since` (Unix time) as an integer with a unit, such as 5m."""
    seconds = max(0, int(time.time() - since))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def format_size(num_bytes: float) -> str:
    """Format a number of bytes in MiB, such as 1.5M."""
    return f"{num_bytes / 2**20:.1f}M"


def make_missing_packages_error(error: ImportError) -> ConfigError:
    """Build the error for packages that are not installed, with the command that installs them."""
    return ConfigError(f"`roll-sandbox` requires packages that are not installed ({error}): pip install {DISTRIBUTION}")


def open_store(database: str | None) -> Store:
    """Open a service's database, and migrate its tables to this version."""
    try:
        from roll_sandbox.service.settings import get_default_database
        from roll_sandbox.service.store import Store
    except ImportError as error:
        raise make_missing_packages_error(error) from None
    store = Store(database or get_default_database())
    store.migrate()
    return store
