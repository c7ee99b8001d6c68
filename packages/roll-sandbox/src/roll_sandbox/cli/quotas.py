"""`roll-sandbox quota`: manages the quotas of a service's owners."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from roll_sandbox.cli.common import ByteSize, database_option, open_store, to_single_line
from roll_sandbox.errors import ConfigError

if TYPE_CHECKING:
    from roll_sandbox.service.records import RecordStore

__all__ = ["quota"]

_NUMBER_PATTERN = re.compile(r"\d+(?:\.\d+)?")


class _QuotaValue(click.ParamType):
    """Parameter type for a quota: a number, `none` for no limit, or `default` for the service's default.

    Args:
        kind: type of the number.
        bytes_: true if the number is a size, such as 8GiB.
        bound: true if a bound is required, so that `none` is rejected.
    """

    name = "amount"

    def __init__(self, kind: type, *, bytes_: bool = False, bound: bool = False) -> None:
        self._kind, self._bytes, self._bound = kind, bytes_, bound

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "default" or (value == "none" and not self._bound):
            return value
        if self._bytes:
            return ByteSize().convert(value, param, ctx)
        if not _NUMBER_PATTERN.fullmatch(value) or not float(value) > 0:
            others = "" if self._bound else "none, "
            self.fail(f"must be a positive number, {others}or default, got '{value[:40]}'.", param, ctx)
        return self._kind(float(value))


_FIELDS = {
    "sandboxes": ("sandboxes", _QuotaValue(int), "Maximum number of live sandboxes."),
    "memory": ("memory_bytes", _QuotaValue(int, bytes_=True), "Maximum total memory limit of all sandboxes."),
    "disk": ("disk_bytes", _QuotaValue(int, bytes_=True), "Maximum total disk limit of all sandboxes."),
    "cpu": ("cpu_s", _QuotaValue(float), "Maximum CPU seconds per program."),
    "lifetime": ("lifetime_s", _QuotaValue(float, bound=True), "Maximum lifetime of a sandbox, in seconds."),
    "programs": ("programs", _QuotaValue(int), "Maximum number of concurrently running programs."),
    "rate": (
        "requests_per_s",
        _QuotaValue(float, bound=True),
        "Maximum average number of requests and messages per second.",
    ),
}


@click.group()
def quota() -> None:
    """Manage the quotas of owners. For fields that are not set, the defaults of `roll-sandbox serve` apply.

    A running server applies a change within seconds; running sandboxes are not affected.
    """


def _quota_options(command: Any) -> Any:
    for option, (field, kind, meaning) in reversed(_FIELDS.items()):
        command = click.option(f"--{option}", field, type=kind, default=None, help=meaning)(command)
    return command


@quota.command("set")
@click.argument("owner")
@_quota_options
@database_option
def set_quota(owner: str, database: str | None, **options: Any) -> None:
    """Set fields of OWNER's quota, each to a number, `none` (no limit) or `default` (the service's default)."""
    from roll_sandbox.service.tokens import check_owner

    check_owner(owner)
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        raise ConfigError(
            f"no option specified: pass at least one of {', '.join(f'--{option}' for option in _FIELDS)}."
        )
    records = _open_records(database)
    fields = {**records.load_quotas().get(owner, {}), **given}
    records.set_quota(
        owner, {name: None if value == "none" else value for name, value in fields.items() if value != "default"}
    )
    _print_quota(owner, records.load_quotas().get(owner, {}))


@quota.command("show")
@click.argument("owner")
@database_option
def show_quota(owner: str, database: str | None) -> None:
    """Show the fields of OWNER's quota that are set."""
    _print_quota(owner, _open_records(database).load_quotas().get(owner, {}))


@quota.command("list")
@database_option
def list_quotas(database: str | None) -> None:
    """Show the quotas of all owners for whom a field is set."""
    for owner, fields in sorted(_open_records(database).load_quotas().items()):
        _print_quota(owner, fields)


def _print_quota(owner: str, fields: dict[str, Any]) -> None:
    text = "  ".join(
        f"{option}={_format_value(fields[field])}" for option, (field, *_) in _FIELDS.items() if field in fields
    )
    click.echo(f"{owner}  {text or 'default'}")


def _format_value(value: float | None) -> str:
    if not isinstance(value, int | float | None):
        return to_single_line(value)  # a row that was edited by hand
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _open_records(database: str | None) -> RecordStore:
    store = open_store(database)
    from roll_sandbox.service.records import RecordStore

    return RecordStore(store)
