"""`roll view`: on the screen where there is one, and otherwise as a table."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.cli.viewing.cells import SHOWN, cell
from roll.cli.viewing.index import Filter, RolloutFile, Row, parse_filter, rollout_files, sorted_rows
from roll.errors import UserError
from roll.tracking import RunDirectory

__all__ = ["show_rollouts"]


def show_rollouts(path: str, filters: str, sort: str, *, plain: bool, limit: int) -> None:
    """Show the rollouts of a run, on the full screen or as a table.

    Raises:
        UserError: there is no run, it has no rollouts, or the filter is malformed.
    """
    run = RunDirectory.open(path)
    wanted = parse_filter(filters)
    sorted_rows([], sort or "step")
    files = rollout_files(run.rollouts_dir)
    if not files:
        raise UserError(f"run '{path}' has no rollouts yet, or was trained with tracking.rollouts=false.")
    if not plain and sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from roll.cli.viewing.screen import RolloutApp
        except ImportError:
            click.echo("The package 'textual' is not here (pip install textual): a table in its place.", err=True)
        else:
            RolloutApp(run, filters, sort).run()
            return
    rows, damaged = _rows(files, wanted, limit if not sort else None)
    if len(damaged) == len(files):
        raise damaged[0]
    for error in damaged:
        click.echo(f"Left out: {error}", err=True)
    click.echo(_table((sorted_rows(rows, sort) if sort else rows)[:limit]))


def _rows(files: Sequence[RolloutFile], wanted: Filter, limit: int | None) -> tuple[list[Row], list[UserError]]:
    """Those that a filter takes, of the newest files until there are `limit`; and of damaged files, what is wrong."""
    rows: list[Row] = []
    damaged: list[UserError] = []
    for file in files:
        try:
            rows += file.rows(wanted)
        except UserError as error:
            damaged.append(error)
        if limit is not None and len(rows) >= limit:
            break
    return rows, damaged


def _table(rows: list[Row]) -> str:
    table = Table(box=None, header_style="", padding=(0, 2, 0, 0))
    for name in SHOWN:
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row.values[name]) for name in SHOWN))
    screen = Console(file=io.StringIO(), width=160, force_terminal=False, color_system=None)
    screen.print(table if rows else Text("No rollout is like that."))
    assert isinstance(screen.file, io.StringIO)
    return "\n".join(line.rstrip() for line in screen.file.getvalue().rstrip().splitlines())
