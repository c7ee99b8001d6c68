"""The full screen of `roll view`, with Textual: a list of rollouts, a whole rollout, its group, its tokens.

    files ──► a thread reads them, newest first ──► the list ──(Enter, g, t)──► a screen for the selected rollout

Invariants: a model's text is shown as `Text` of printable characters, so neither escape sequences nor markup in it have
an effect; only the first part of a long text is shown; the run's files are only read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import HorizontalScroll, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from roll.cli.view.cells import LIST_COLUMNS, format_cells
from roll.cli.view.index import Filter, Row, list_rollout_files, parse_filter, sort_rows
from roll.cli.view.tokens import TokenScreen
from roll.errors import UserError
from roll.media.stored_images import describe_images
from roll.tracking import RunDirectory
from roll.tracking.escape import escape_controls, shorten
from roll.tracking.reading.files import SafeDirectory

__all__ = ["RolloutApp"]

MAX_ROWS = 20_000
"""Maximum number of rows of a list; a filter finds the rest."""
MAX_ATTEMPTS = 256
"""Maximum number of attempts of a group."""
MAX_CHARACTERS = 20_000
"""Maximum number of characters shown of one prompt or answer."""
HELP = """\
Enter     show the whole rollout        g   show the group side by side
t         show the tokens               /   filter
s         sort by the next column       r   read the files again
Escape    back                          q   quit

Filters   reward>0.5  step=3..7  tokens>=200  correct=no  verdict=wrong  domain=math  kind=eval  "some words"
Columns   step draw index reward advantage tokens kind domain verdict status finish correct engine id"""


class RolloutApp(App[None]):
    """The application: a list of rollouts, and the screens that open from it."""

    CSS = """
    #filter { display: none; }
    #filter.open { display: block; }
    #list { height: 2fr; }
    #preview { height: 1fr; border-top: solid $primary; padding: 0 1; }
    #status { height: 1; padding: 0 1; }
    .attempt { width: 60; height: 100%; border-right: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("g", "group", "Group"),
        Binding("t", "tokens", "Tokens"),
        Binding("r", "reload", "Reload"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, run: RunDirectory, filters: str = "", sort: str = "") -> None:
        super().__init__()
        self.directory = run
        self.rows: list[Row] = []
        """Rows of the list, in order."""
        self.problem = ""
        self._sought = filters
        self._order = sort
        self._complete = False

    def compose(self) -> ComposeResult:
        yield Input(value=self._sought, placeholder='reward<0.5 correct=no "words"', id="filter")
        yield DataTable(id="list", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="preview"):
            yield Static(id="text")
        yield Static(id="status")
        yield Footer()

    def on_mount(self) -> None:
        table = self._table
        for name in LIST_COLUMNS:
            table.add_column(name, key=name)
        table.focus()
        self.action_reload()

    @property
    def _table(self) -> DataTable[Text]:
        return self.screen_stack[0].query_one("#list", DataTable)

    @property
    def current_row(self) -> Row | None:
        """The row under the cursor, or `None` if the list is empty."""
        place = self._table.cursor_row
        return self.rows[place] if 0 <= place < len(self.rows) else None

    def action_reload(self) -> None:
        """Read the files again, with the current filter."""
        try:
            row_filter = parse_filter(self._sought)
        except UserError as error:
            self.problem = str(error)
            self._show_status()
            return
        self.problem, self.rows, self._complete = "", [], False
        self._table.clear()
        self._read(row_filter)

    # exclusive: reading for a new filter cancels the earlier one.
    @work(thread=True, exclusive=True)
    def _read(self, row_filter: Filter) -> None:
        worker = get_current_worker()
        count = 0
        for file in list_rollout_files(self.directory.rollouts_dir):
            try:
                found = list(itertools.islice(file.read_rows(row_filter), MAX_ROWS - count))
            except UserError as error:
                self.call_from_thread(self._show_problem, str(error))
                continue
            count += len(found)
            if worker.is_cancelled:
                return
            self.call_from_thread(self._add_rows, found)
            if count >= MAX_ROWS:
                break
        if not worker.is_cancelled:
            self.call_from_thread(self._finish_reading)

    def _show_problem(self, problem: str) -> None:
        self.problem = problem
        self._show_status()

    def _add_rows(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        for cells in format_cells(rows):
            self._table.add_row(*cells)
        self._show_status()

    def _finish_reading(self) -> None:
        self._complete = True
        self._sort_rows()

    def _sort_rows(self) -> None:
        """Sort the rows by the selected column."""
        if self._order:
            rows, self.rows = sort_rows(self.rows, self._order), []
            self._table.clear()
            self._add_rows(rows)
        self._show_status()

    def _show_status(self) -> None:
        if self.problem:
            text = Text(escape_controls(self.problem), style="bold red")
        else:
            more = "" if self._complete else ", reading"
            more = f", only the newest {MAX_ROWS}: use a filter for others" if len(self.rows) >= MAX_ROWS else more
            order = f", sorted by {self._order}" if self._order else ""
            text = Text(f"{escape_controls(self.directory.name)}: {len(self.rows)} rollouts{order}{more}")
        self.screen_stack[0].query_one("#status", Static).update(text)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.data_table.id == "list" and (row := self.current_row) is not None:
            self._show_preview(row)

    @work(thread=True, exclusive=True, group="preview")
    def _show_preview(self, row: Row) -> None:
        text = self._describe_row(row)
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self.screen_stack[0].query_one("#text", Static).update, text)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "list" and (row := self.current_row) is not None:
            self.push_screen(_TextScreen([self._describe_row(row)]))

    def _describe_row(self, row: Row) -> Text:
        try:
            return describe_rollout(row.file.read_rollout(row.number), SafeDirectory(self.directory.path))
        except UserError as error:
            return Text(escape_controls(str(error)), style="bold red")

    def action_filter(self) -> None:
        """Open the input line for a filter."""
        if len(self.screen_stack) > 1:
            return
        box = self.screen_stack[0].query_one("#filter", Input)
        box.add_class("open")
        box.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._sought = event.value
        event.input.remove_class("open")
        self._table.focus()
        self.action_reload()

    def action_sort(self) -> None:
        """Sort by the next column; after the last column, restore the order of the files."""
        if len(self.screen_stack) > 1:
            return
        orders = ["", "-reward", "reward", "-tokens", "tokens", "-advantage", "advantage", "-step", "step", "verdict"]
        self._order = orders[(orders.index(self._order) + 1) % len(orders)] if self._order in orders else ""
        if self._order:
            self._sort_rows()
        else:
            self.action_reload()

    def action_group(self) -> None:
        """Show all attempts at the prompt of the current row."""
        if (row := self.current_row) is None or len(self.screen_stack) > 1:
            return
        try:
            same = (other for other in row.file.read_rows(Filter()) if other.group == row.group)
            attempts = list(itertools.islice(same, MAX_ATTEMPTS))
        except UserError as error:  # the file was deleted or changed after it was listed
            self._show_problem(str(error))
            return
        self.push_screen(_TextScreen([self._describe_row(attempt) for attempt in sort_rows(attempts, "index")]))

    def action_tokens(self) -> None:
        """Show the tokens of the current row."""
        if (row := self.current_row) is not None and len(self.screen_stack) == 1:
            self.push_screen(TokenScreen(self.directory, row))

    def action_help(self) -> None:
        """Show all keys."""
        if len(self.screen_stack) == 1:
            self.push_screen(_TextScreen([Text(HELP)]))


class _TextScreen(Screen[None]):
    """A screen with one or more columns of text side by side."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, texts: Sequence[Text]) -> None:
        super().__init__()
        self._texts = texts

    def compose(self) -> ComposeResult:
        if len(self._texts) == 1:
            with VerticalScroll():
                yield Static(self._texts[0], classes="reading")
        else:
            with HorizontalScroll():
                for text in self._texts:
                    with VerticalScroll(classes="attempt"):
                        yield Static(text, classes="reading")
        yield Footer()


def describe_rollout(rollout: dict[str, Any], run: SafeDirectory | None = None) -> Text:
    """Format a whole rollout, without markup or control characters; if `run` is given, image sizes are shown."""
    text = Text()
    facts = ("step", "rollout_id", "reward", "correct", "advantage", "verdict", "finish_reason", "status", "cause")
    for name in facts:
        value = rollout.get(name)
        if value not in (None, ""):
            text_value = f"{value:.4g}" if isinstance(value, float) else str(value)
            text.append(f"{name} ", style="dim").append(f"{shorten(text_value, 500)}  ")
    for name, value in rollout.get("components") or ():
        text.append(f"{shorten(str(name), 60)} ", style="dim").append("–  " if value is None else f"{value:.3g}  ")
    for message in filter(None, rollout.get("messages") or ()):
        text.append(f"\n\n{shorten(str(message['role']), 40)}\n", style="bold blue")
        content = shorten(message["content"] or "", MAX_CHARACTERS)
        text.append(content if run is None else describe_images(run, content))
    text.append("\n\nanswer of the model\n", style="bold green")
    text.append(shorten(rollout.get("text") or "", MAX_CHARACTERS))
    if rollout.get("answer"):
        text.append("\n\nreference\n", style="bold yellow").append(shorten(rollout["answer"], MAX_CHARACTERS))
    return text
