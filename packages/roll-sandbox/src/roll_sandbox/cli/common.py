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
    "Bytes",
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

_PAGE = 1000
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB)?")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DEFAULT_URL = "http://127.0.0.1:8741"

database_option = click.option(
    "--database", metavar="URL", default=None, help="Database URL of SQLAlchemy; by default a SQLite file of this user."
)


class Bytes(click.ParamType):
    """A number of bytes with its unit, such as 8GiB; a number alone is in `unit` bytes."""

    name = "size"

    def __init__(self, *, unit: int = 1, least: int = 1) -> None:
        self._unit, self._least = unit, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = _SIZE.fullmatch(value)
        bytes_ = int(float(found[1]) * _UNITS.get(found[2], self._unit)) if found else 0
        if bytes_ < self._least:
            such = f"8GiB, and {self._least >> 20}MiB at least" if self._least > 1 else "8GiB"
            self.fail(f"must be a size such as {such}, got '{value[:40]}'.", param, ctx)
        return bytes_


class SandboxRow(BaseModel):
    """A sandbox as a service lists it; a newer service may send more fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    sandbox: str
    state: str
    created: float
    expires: float
    worker: str
    programs: int


@dataclass(frozen=True, kw_only=True)
class ServiceAddress:
    """A service, and the token to use it with."""

    url: str
    token: str
    ca_file: str | None

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call a route of the service; see `remote.calls.call`.

        Raises:
            ConfigError: the service refuses the request.
        """
        from roll_sandbox.errors import SandboxAccessError, SandboxRequestError, UnknownSandboxError
        from roll_sandbox.remote.calls import call_service

        try:
            return await call_service(self.url, self._checked_token(), method, path, body=body, ca_file=self.ca_file)
        except (SandboxAccessError, SandboxRequestError, UnknownSandboxError) as error:
            raise ConfigError(str(error)) from None

    @asynccontextmanager
    async def runtime(self) -> AsyncIterator[RemoteRuntime]:
        """Run the body with a connection to the service; sandboxes made over it and not left end with the block."""
        from roll_sandbox.remote import RemoteRuntime

        runtime = RemoteRuntime(self.url, self._checked_token(), ca_file=self.ca_file)
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.close()

    async def sandboxes(self) -> list[SandboxRow]:
        """Return the sandboxes of the token's owner, oldest first."""
        found: list[SandboxRow] = []
        after, full = "", True
        while full:
            page = await self.call("GET", f"/v1/sandboxes?limit={_PAGE}{after}")
            found += map(SandboxRow.model_validate, page)
            full = len(page) == _PAGE
            after = f"&after={found[-1].sandbox}" if found else ""
        return sorted(found, key=lambda each: (each.created, each.sandbox))

    async def resolve_name(self, beginning: str) -> str:
        """Return the name of the sandbox that has this name, or the only one whose name begins with it.

        Raises:
            ConfigError: no sandbox name, or more than one, begins with it.
        """
        names = [each.sandbox for each in await self.sandboxes()]
        found = [name for name in names if name == beginning] or [name for name in names if name.startswith(beginning)]
        if len(found) == 1:
            return found[0]
        what = f"matches {len(found)} sandboxes" if found else "does not match any of your sandboxes"
        raise ConfigError(f"'{to_single_line(beginning)}' {what}: `roll-sandbox ls` lists them.")

    def _checked_token(self) -> str:
        if not self.token:
            raise ConfigError(
                f"the sandbox service at {self.url} needs a token: --token, or ROLL_SANDBOX_TOKEN in the environment. "
                "`roll-sandbox token create OWNER` creates one on the service's machine."
            )
        return self.token


def service_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select the service, which the command gets as `place`."""

    @click.option(
        "--url",
        envvar="ROLL_SANDBOX_URL",
        default=DEFAULT_URL,
        show_default=True,
        help="URL of the service, as printed by `roll-sandbox serve`; or ROLL_SANDBOX_URL.",
    )
    @click.option(
        "--token", envvar="ROLL_SANDBOX_TOKEN", default="", help="Token of the service; or ROLL_SANDBOX_TOKEN."
    )
    @click.option("--ca-file", default=None, help="CA certificates with which to verify the service's certificate.")
    @wraps(command)
    def wrapped(*arguments: Any, url: str, token: str, ca_file: str | None, **options: Any) -> Any:
        return command(*arguments, place=ServiceAddress(url=url.rstrip("/"), token=token, ca_file=ca_file), **options)

    return wrapped


def to_single_line(value: object) -> str:
    """Return an untrusted value as one line that is harmless on a terminal."""
    return " ".join(escape_control_chars(str(value)).split())


def format_age(since: float) -> str:
    """Return the time since `since` (Unix time), as one number with its unit."""
    seconds = max(0, int(time.time() - since))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def format_size(num_bytes: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{num_bytes / 2**20:.1f}M"


def make_missing_packages_error(error: ImportError) -> ConfigError:
    return ConfigError(f"packages that `roll-sandbox` needs are not installed ({error}): pip install {DISTRIBUTION}")


def open_store(database: str | None) -> Store:
    """Open a service's database, with the tables of this version."""
    try:
        from roll_sandbox.service.settings import default_database
        from roll_sandbox.service.store import Store
    except ImportError as error:
        raise make_missing_packages_error(error) from None
    store = Store(database or default_database())
    store.migrate()
    return store
