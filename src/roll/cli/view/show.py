"""`roll view`: full screen on a terminal, otherwise as a table."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.cli.view.cells import LIST_COLUMNS, format_cells
from roll.cli.view.index import Filter, RolloutFile, Row, list_rollout_files, parse_filter, sort_rows
from roll.errors import UserError
from roll.tracking import RunDirectory

__all__ = ["show_rollouts"]

TABLE_WIDTH = 220
"""Width of a table in characters: enough for the beginnings of prompt and answer."""
_SORT_BATCH_SIZE = 10_000
"""Number of rows that are sorted together."""


def show_rollouts(path: str, filters: str, sort: str, *, plain: bool, limit: int) -> None:
    """Show the rollouts of a run, on the full screen or as a table.

    Raises:
        UserError: the run does not exist or has no rollouts, or the filter is malformed.
    """
    run = RunDirectory.open(path)
    row_filter = parse_filter(filters)
    sort_rows([], sort or "step")  # rejects an unknown column before any file is read
    files = list_rollout_files(run.rollouts_dir)
    if run.rollouts_dir.is_symlink():
        raise UserError(
            f"'{run.rollouts_dir}' is a symbolic link, which is not followed: pass the run directory that contains "
            "the files."
        )
    if not files and run.samples_dir.is_dir():
        raise UserError(
            f"run '{path}' generates images, not text, so it has no rollouts: its samples are the pictures and tables "
            f"in '{run.samples_dir}'."
        )
    if not files:
        raise UserError(f"run '{path}' has no rollouts yet, or was trained with tracking.rollouts=false.")
    if not plain and sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from roll.cli.view.screen import RolloutApp
        except ImportError:
            click.echo("Printing a table, because 'textual' is not installed (pip install textual).", err=True)
        else:
            RolloutApp(run, filters, sort).run()
            return
    rows, corrupted = _read_rows(files, row_filter, sort, limit)
    if len(corrupted) == len(files):
        raise corrupted[0]
    for error in corrupted:
        click.echo(f"Skipped: {error}", err=True)
    click.echo(_format_table(rows))


def _read_rows(
    files: Sequence[RolloutFile], row_filter: Filter, sort: str, limit: int
) -> tuple[list[Row], list[UserError]]:
    """Return the first `limit` matching rows, newest files first or sorted by `sort`, and errors of corrupted files."""
    rows: list[Row] = []
    corrupted: list[UserError] = []
    for file in files:
        found = file.read_rows(row_filter)
        try:
            while more := list(itertools.islice(found, _SORT_BATCH_SIZE if sort else limit - len(rows))):
                rows = sort_rows([*rows, *more], sort)[:limit] if sort else [*rows, *more]
        except UserError as error:
            corrupted.append(error)
        if not sort and len(rows) >= limit:
            break
    return rows, corrupted


def _format_table(rows: list[Row]) -> str:
    table = Table(box=None, header_style="", padding=(0, 2, 0, 0))
    for name in LIST_COLUMNS:
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for cells in format_cells(rows):
        table.add_row(*cells)
    screen = Console(file=io.StringIO(), width=TABLE_WIDTH, force_terminal=False, color_system=None)
    screen.print(table if rows else Text("No rollout matches the filter."))
    assert isinstance(screen.file, io.StringIO)
    return "\n".join(line.rstrip() for line in screen.file.getvalue().rstrip().splitlines())
