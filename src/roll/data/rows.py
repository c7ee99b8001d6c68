"""From a table's rows to prompts, and which of them are held out.

    table ── one pass: every row is checked, and its side decided ──► row numbers to train on │ row numbers held out
                                                                         │
                                      a row is read again when it is drawn ◄┘

So a source costs a few bytes of memory per row, and a malformed row is refused before training.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roll.config.data import FileData, HuggingFaceData, PythonData
from roll.data.source import Fingerprint, content_hash
from roll.errors import DataError
from roll.registry import nearest
from roll.types import Message, Prompt

__all__ = ["Row", "RowPrompts", "Table", "messages_of", "prompt_of_row", "split_by_table", "split_held_out"]

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
TableConfig: TypeAlias = FileData | HuggingFaceData | PythonData
"""Sources whose rows have columns."""

_ROLES = ("system", "user", "assistant", "tool")


class Table(Protocol):
    """Rows on disk, numbered from 0."""

    name: str
    """For messages: the file, or the dataset and its split."""

    def scan(self, limit: int | None) -> Iterator[Row]:
        """Read all rows from the first on, at most `limit`; called before any `row`."""
        ...

    def row(self, index: int) -> Row:
        """Read one row again, by its number."""
        ...

    def key(self, index: int) -> str:
        """What the row's uid ends with: its number (or line) from 1."""
        ...

    def where(self, index: int) -> str:
        """The row's place, for messages."""
        ...


class RowPrompts:
    """The prompts of some rows of a table, read when asked for; a `Source`."""

    def __init__(
        self,
        config: TableConfig,
        domain: str,
        table: Table,
        rows: NDArray[np.int64],
        fingerprint: str,
        prefix: str,
    ) -> None:
        self.fingerprint = fingerprint
        self._config, self._domain, self._table = config, domain, table
        self._rows, self._prefix = rows, prefix

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = int(self._rows[index])
        key = self._prefix + self._table.key(row)
        return prompt_of_row(self._config, self._domain, self._table.row(row), key, self._table.where(row))


def _scan(config: TableConfig, domain: str, table: Table, prefix: str) -> Iterator[tuple[int, Prompt]]:
    """Every row's number and prompt, checked.

    Raises:
        DataError: there is no row, or one is malformed.
    """
    number = -1
    for number, row in enumerate(table.scan(config.limit)):
        yield number, prompt_of_row(config, domain, row, prefix + table.key(number), table.where(number))
    if number < 0:
        raise DataError(f"{table.name} holds no rows: give one with at least one prompt.")


def _side(
    config: TableConfig,
    domain: str,
    table: Table,
    rows: list[int],
    digest: Fingerprint,
    prefix: str,
) -> RowPrompts:
    return RowPrompts(config, domain, table, np.asarray(rows, np.int64), digest.text(), prefix)


def _shuffled(rows: list[int], seed: int) -> list[int]:
    """Shuffle by the seed, so that the first few held-out prompts are a fair sample of a sorted table."""
    return [rows[i] for i in np.random.default_rng([seed, 0x0E1D]).permutation(len(rows))]


def split_held_out(config: TableConfig, domain: str, table: Table, seed: int) -> tuple[RowPrompts, RowPrompts]:
    """Training and held-out prompts of one table, `config.held_out` of them held out.

    Which side a prompt is on depends on its content and the seed, not on its neighbours: a question that occurs twice
    never leaks, and adding rows moves none.

    Raises:
        DataError: the table cannot be read, is empty, or a row is malformed.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    digests = (Fingerprint(), Fingerprint())
    for number, prompt in _scan(config, domain, table, ""):
        side = content_hash(prompt, seed) / 2**64 < config.held_out
        sides[side].append(number)
        digests[side].add(prompt)
    return (
        _side(config, domain, table, sides[0], digests[0], ""),
        _side(config, domain, table, _shuffled(sides[1], seed), digests[1], ""),
    )


def split_by_table(
    config: TableConfig, domain: str, table: Table, held_out: Table, seed: int
) -> tuple[RowPrompts, RowPrompts]:
    """Training prompts of one table, held-out ones of another. What occurs in both is not trained on.

    Raises:
        DataError: a table cannot be read, is empty, or a row is malformed; or every prompt is in both.
    """
    kept: list[int] = []
    evaluation: list[int] = []
    digests = (Fingerprint(), Fingerprint())
    seen: set[int] = set()
    for number, prompt in _scan(config, domain, held_out, "held_out/"):
        evaluation.append(number)
        digests[1].add(prompt)
        seen.add(content_hash(prompt))
    num_shared = 0
    for number, prompt in _scan(config, domain, table, ""):
        if content_hash(prompt) in seen:
            num_shared += 1
        else:
            kept.append(number)
            digests[0].add(prompt)
    if num_shared:
        message = f"{num_shared} prompts of {table.name} also occur in {held_out.name}"
        if not kept:
            raise DataError(f"{message}, so none is left to train on: evaluate on other data.")
        logger.warning("%s: they are held out, not trained on", message)
    return (
        _side(config, domain, table, kept, digests[0], ""),
        _side(config, domain, held_out, _shuffled(evaluation, seed), digests[1], "held_out/"),
    )


def messages_of(text: str, system_prompt: str | None, template: str) -> tuple[Message, ...]:
    """The chat that asks for `text`."""
    user: Message = {"role": "user", "content": template.replace("{prompt}", text)}
    return ({"role": "system", "content": system_prompt}, user) if system_prompt else (user,)


def prompt_of_row(config: TableConfig, domain: str, row: Row, key: str, where: str) -> Prompt:
    """One row as a prompt; columns other than prompt, answer and demonstration become its metadata.

    Args:
        key: what the prompt's uid ends with.
        where: the row's place, for messages.

    Raises:
        DataError: a column is missing or of the wrong type.
    """
    content = _column(row, config.prompt_key, where, "prompt_key")
    taken = {config.prompt_key, config.answer_key, config.expert_key}
    return Prompt(
        uid=f"{domain}/{key}",
        domain=domain,
        messages=_messages(content, config, where),
        answer=_answer(row, config, where),
        expert=_expert(row, config, where),
        metadata={name: value for name, value in row.items() if name not in taken},
    )


def _column(row: Row, name: str, where: str, option: str) -> Any:
    if name not in row:
        columns = ", ".join(_short(column) for column in list(row)[:20]) or "none"
        raise DataError(
            f"{where}: there is no column '{name}'.{nearest(name, list(row))} It has: {columns}. "
            f"Set `{option}` to the right one."
        )
    return row[name]


def _messages(content: Any, config: TableConfig, where: str) -> tuple[Message, ...]:
    if isinstance(content, str) and content.strip():
        return messages_of(_text(content, config.prompt_key, where), config.system_prompt, config.prompt_template)
    if isinstance(content, list) and content and all(_is_message(message) for message in content):
        system = config.system_prompt if content[0]["role"] != "system" else None
        first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        chat: list[Message] = [
            {"role": m["role"], "content": _text(m["content"], config.prompt_key, where)} for m in content
        ]
        return (*first, *chat)
    raise DataError(
        f"{where}: column '{config.prompt_key}' must be text or a list of chat messages "
        f"({{role, content}}, roles {', '.join(_ROLES)}), got {_short(content)}."
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("role") in _ROLES and isinstance(value.get("content"), str)


def _text(value: str, column: str, where: str) -> str:
    """The text, if it is one: half a surrogate pair, which JSON can spell, has no tokens."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: column '{column}' is not valid Unicode text at character {error.start}: {_short(value)}."
        ) from None
    return value


def _answer(row: Row, config: TableConfig, where: str) -> str:
    if config.answer_key is None:
        return ""
    value = _column(row, config.answer_key, where, "answer_key")
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, str | int | float) and not hasattr(value, "as_tuple"):  # the last is a Decimal
        raise DataError(f"{where}: column '{config.answer_key}' must be text or a number, got {_short(value)}.")
    if not isinstance(value, str | int) and not math.isfinite(value):  # so data frames say that there is none
        raise DataError(f"{where}: column '{config.answer_key}' is {value}: give an answer, or leave the row out.")
    try:
        text = str(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        raise DataError(f"{where}: column '{config.answer_key}' is too long a number: give it as text.") from None
    text = _text(text, config.answer_key, where)
    if config.answer_pattern is not None:
        found = re.search(config.answer_pattern, text)
        if found is None:
            raise DataError(f"{where}: answer_pattern {config.answer_pattern!r} is not found in {_short(text)}.")
        text = ((found.group(1) if found.re.groups else found.group(0)) or "").strip()
    comparing = [reward.type for reward in config.reward if reward.needs_answer]
    if comparing and not text.strip():
        raise DataError(
            f"{where}: the answer is empty, but the reward '{comparing[0]}' compares with it: fill it in, "
            "or choose a reward that needs none."
        )
    return text


def _expert(row: Row, config: TableConfig, where: str) -> tuple[str, ...]:
    """The demonstration; nothing where the row has none."""
    if config.expert_key is None:
        return ()
    value = _column(row, config.expert_key, where, "expert_key")
    if value is None or value == "":
        return ()
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column '{config.expert_key}' must be the text of an answer, or null where there is none, got "
            f"{_short(value)}."
        )
    return (_text(value, config.expert_key, where),)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # it nests too deeply, holds too long a number, or is of a class of the user's own
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
