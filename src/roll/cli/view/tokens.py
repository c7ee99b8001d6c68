"""The tokens of one rollout, on a screen of `roll view`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from roll.cli.view.index import Row
from roll.errors import RollError
from roll.tracking import RunDirectory
from roll.tracking.escape import escape_controls

__all__ = ["TokenScreen"]

MAX_TOKENS = 5000
"""Maximum number of tokens of one rollout, from its beginning."""
_COLUMNS = ("#", "token", "id", "log-prob", "probability", "version")


class TokenScreen(Screen[None]):
    """A screen with a row per token: its log-prob, red if it was unlikely, and the policy version that generated it."""

    CSS = "#about { height: 1; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, run: RunDirectory, row: Row) -> None:
        super().__init__()
        self._directory = run
        self._row = row

    def compose(self) -> ComposeResult:
        yield Static(Text("reading the model's tokenizer …"), id="about")
        yield DataTable(id="tokens", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one("#tokens", DataTable)
        for name in _COLUMNS:
            table.add_column(name, key=name)
        table.focus()
        self._read()

    @work(thread=True)
    def _read(self) -> None:
        try:
            rollout = self._row.file.read_rollout(self._row.number, tokens=True)
            decode, problem = _load_token_decoder(self._directory)
        except RollError as error:
            self.app.call_from_thread(self._show, [], str(error))
            return
        ids = rollout.get("token_ids") or []
        lines = format_tokens(rollout, decode)
        said = f"{len(ids)} tokens" + (f", of which the first {MAX_TOKENS} are shown" if len(ids) > MAX_TOKENS else "")
        self.app.call_from_thread(self._show, lines, f"{said}. {problem}")

    def _show(self, lines: list[list[Text]], note: str) -> None:
        table = self.query_one("#tokens", DataTable)
        for line in lines:
            table.add_row(*line)
        self.query_one("#about", Static).update(Text(escape_controls(note)))


def format_tokens(rollout: dict[str, Any], decode: Callable[[int], str]) -> list[list[Text]]:
    """Return one row of cells per token (position, text, id, log-prob, probability, policy version), for at most
    `MAX_TOKENS` tokens.
    """
    ids = (rollout.get("token_ids") or [])[:MAX_TOKENS]
    logprobs, versions = rollout.get("logprobs") or [], rollout.get("policy_versions") or []
    lines = []
    for place, token in enumerate(ids):
        logprob = _get_number(logprobs, place)
        share = math.exp(min(0.0, logprob)) if logprob == logprob else math.nan
        style = "bold red" if share < 0.05 else "yellow" if share < 0.5 else ""
        text = escape_controls(decode(token)).replace("\n", "⏎").replace("\t", "⇥")
        lines.append(
            [
                Text(str(place), style="dim"),
                Text(text, style=style),
                Text(str(token), style="dim"),
                Text(f"{logprob:.4f}", style=style),
                Text(f"{share:.1%}", style=style),
                Text(str(versions[place]) if place < len(versions) else "–", style="dim"),
            ]
        )
    return lines


def _get_number(values: Sequence[float | None], index: int) -> float:
    value = values[index] if index < len(values) else None
    return math.nan if value is None else value


def _load_token_decoder(run: RunDirectory) -> tuple[Callable[[int], str], str]:
    """Return a function that decodes one token, and a note.

    If there is no tokenizer on this machine, the function returns the ID as text, and the note has the reason.
    Otherwise, the note is empty.
    """
    try:
        found = run.tokenizer_path if run.tokenizer_path.is_file() else _find_model_tokenizer(run)
    except RollError as error:
        return str, f"Only token ids are shown: {error}"
    if found is None:
        return str, "Only token ids are shown: neither the run nor the model has a tokenizer.json on this machine."
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(found))
    except Exception as error:  # `tokenizers` raises plain exceptions for corrupted files
        return str, f"Only token ids are shown: the tokenizer cannot be read ({error})."
    return lambda token: tokenizer.decode([token], skip_special_tokens=False), ""


def _find_model_tokenizer(run: RunDirectory) -> Path | None:
    """Return the tokenizer file of the model in the run's configuration, or `None` if it is not on this machine."""
    from roll.config.document import read
    from roll.models.resolve import find_model

    model = read(run.config_path).tree.get("model")
    path = model.get("path") if isinstance(model, dict) else model
    found = find_model(path, allow_quantized=True) if isinstance(path, str) else None
    return found / "tokenizer.json" if found is not None and (found / "tokenizer.json").is_file() else None
