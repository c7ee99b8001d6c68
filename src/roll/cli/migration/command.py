"""`roll config from-trl` and `from-verl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from roll.cli.migration.convert import ConvertedConfig

__all__ = ["from_trl", "from_verl"]

_file_argument = click.argument("file", metavar="FILE")
_rows_option = click.option(
    "--rows", type=click.IntRange(min=1), metavar="N", help="Number of rows of the dataset; required to convert epochs."
)
_output_option = click.option(
    "--output", "-o", metavar="PATH", help="Write the configuration to PATH, which must not exist yet."
)


def _write(converted: ConvertedConfig, output: str | None) -> None:
    from roll.errors import ConfigError

    click.echo(converted.format_report(), err=True)
    if output is None:
        click.echo(converted.format_yaml(), nl=False)
        return
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(converted.format_yaml())
    except FileExistsError:
        raise ConfigError(f"'{output}' already exists: choose another name.") from None
    click.echo(f"Check the configuration with: roll check {output}", err=True)


@click.command(name="from-trl")
@_file_argument
@click.option(
    "--trainer",
    type=click.Choice(["grpo", "sft", "dpo", "reward"]),
    help="Type of the TRL trainer; by default determined from FILE.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of processes of the TRL run; the global batch size is proportional to it.",
)
@click.option(
    "--set",
    "extra_values",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of TRL that FILE does not set; may be repeated.",
)
@_rows_option
@_output_option
def from_trl(
    file: str, trainer: str | None, processes: int, extra_values: tuple[str, ...], rows: int | None, output: str | None
) -> None:
    """Convert a configuration of TRL (as for `trl grpo --config FILE`) or a Python script that uses TRL.

    A script (.py) is parsed, never run: values that are not constants are listed with their lines and can be given with
    --set.

    Prints ROLL's configuration, and a report on every key to standard error.
    """
    from roll.cli.migration.trl import from_trl as convert

    keys = dict(map(_parse_key_and_value, extra_values))
    _write(convert(file, trainer=trainer, processes=processes, rows=rows, extra_values=keys), output)


def _parse_key_and_value(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE`, with a YAML value."""
    from roll.config.document import parse

    key, separator, value = text.partition("=")
    if not (separator and key.strip().isidentifier()):
        raise click.BadParameter(f"expected KEY=VALUE, got '{text}'.", param_hint="--set")
    return key.strip(), parse(value, f"--set {text}")[0]


@click.command(name="from-verl")
@_file_argument
@_rows_option
@_output_option
def from_verl(file: str, rows: int | None, output: str | None) -> None:
    """Convert a configuration of verl: a YAML file, or a script or list of Hydra overrides.

    Prints ROLL's configuration, and a report on every key to standard error.
    """
    from roll.cli.migration.verl import from_verl as convert

    _write(convert(file, rows=rows), output)
