"""`roll config from-trl` and `from-verl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from roll.cli.migration.convert import Converted

__all__ = ["from_trl", "from_verl"]

_file = click.argument("file", metavar="FILE")
_rows = click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Rows of the data set, for epochs.")
_output = click.option("--output", "-o", metavar="PATH", help="Write the configuration to PATH; it must not exist.")


def _tell(converted: Converted, output: str | None) -> None:
    from roll.errors import ConfigError

    click.echo(converted.report(), err=True)
    if output is None:
        click.echo(converted.yaml(), nl=False)
        return
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(converted.yaml())
    except FileExistsError:
        raise ConfigError(f"'{output}' exists already: choose another name.") from None
    click.echo(f"Look at it with: roll check {output}", err=True)


@click.command(name="from-trl")
@_file
@click.option("--trainer", type=click.Choice(["grpo", "sft", "dpo", "reward"]), help="By default FILE's own.")
@click.option("--processes", type=click.IntRange(min=1), default=1, metavar="N", help="That TRL would be started with.")
@click.option("--set", "further", multiple=True, metavar="KEY=VALUE", help="A key of TRL; may be repeated.")
@_rows
@_output
def from_trl(
    file: str, trainer: str | None, processes: int, further: tuple[str, ...], rows: int | None, output: str | None
) -> None:
    """Convert a configuration of TRL, as `trl grpo --config FILE` takes it, or a Python script.

    A script (.py) is read and never run: what its text does not say as a constant is listed with its line, and --set
    says it.

    Prints ROLL's configuration, and on standard error what became of every key, and what could not be converted.
    """
    from roll.cli.migration.trl import from_trl as convert

    keys = dict(map(_key_and_value, further))
    _tell(convert(file, trainer=trainer, processes=processes, rows=rows, further=keys), output)


def _key_and_value(text: str) -> tuple[str, Any]:
    """Read `KEY=VALUE`, the value as YAML."""
    from roll.config.document import parse

    key, separator, value = text.partition("=")
    if not (separator and key.strip().isidentifier()):
        raise click.BadParameter(f"'{text}' is not KEY=VALUE.", param_hint="--set")
    return key.strip(), parse(value, f"--set {text}")[0]


@click.command(name="from-verl")
@_file
@_rows
@_output
def from_verl(file: str, rows: int | None, output: str | None) -> None:
    """Convert a configuration of verl: a YAML file, or a script or list of Hydra overrides.

    Prints ROLL's configuration, and on standard error what became of every key, and what could not be converted.
    """
    from roll.cli.migration.verl import from_verl as convert

    _tell(convert(file, rows=rows), output)
