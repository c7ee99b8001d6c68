"""From rows to examples of the kind that a pipeline learns from; and what is wrong with which rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np

from roll.config.examples import ExampleColumns
from roll.data.cells import BadRow, Row, column
from roll.data.examples.conversations import answered, checked, conversation_of_row
from roll.data.examples.report import BadRows
from roll.errors import DataError, short
from roll.types import Conversation, Example

__all__ = ["ExampleKind", "ExampleReader"]

LARGEST = 1e18
"""Of scores and margins; a loss takes their squares, in float32."""
ExampleKind: TypeAlias = Literal["supervised", "pair", "labelled", "scored"]
"""One conversation; two answers to the same, the preferred one first; one answer and whether it is wanted; one answer
and its score."""


class ExampleReader:
    """Reads rows as examples of one kind; a `RowReader`.

    Args:
        special_in: finds a special token in a text of a chat.
        bad: takes in what is wrong with which rows.
    """

    def __init__(
        self,
        config: ExampleColumns,
        domain: str,
        kind: ExampleKind,
        special_in: Callable[[str], str | None],
        bad: BadRows,
    ) -> None:
        self._config, self._domain, self._kind = config, domain, kind
        self._special_in = special_in
        self.held_out, self.limit = config.held_out, config.limit
        self._bad = bad
        self._read = {getattr(config, name) for name in type(config).model_fields if name.endswith("_key")}

    def read(self, row: Row, key: str, where: str) -> Example:
        """See `RowReader.read`."""
        try:
            return self._example(row, key, where)
        except DataError:
            raise
        except Exception as error:  # rows that Python makes may be of classes that fail with anything
            raise BadRow("unreadable", f"{where}: cannot be read: {type(error).__name__}: {error}") from error

    def _example(self, row: Row, key: str, where: str) -> Example:
        config = self._config
        conversations = (
            _pair(row, config, where) if self._kind == "pair" else (_single(row, config, where, self._kind),)
        )
        for conversation in conversations:
            self._check_special(conversation, where)
        return Example(
            uid=f"{self._domain}/{key}",
            domain=self._domain,
            conversations=conversations,
            preferred=_label(row, config, where) if self._kind == "labelled" else None,
            target=self._target(row, where),
            metadata={name: value for name, value in row.items() if name not in self._read},
        )

    def refuse(self, error: DataError, where: str) -> None:
        """Counted here; all of them are said at once."""
        self._bad.add(error.reason if isinstance(error, BadRow) else "unreadable", str(error))

    def asked(self, item: Example) -> Iterable[str]:
        """The messages before the first answer, or the text."""
        conversation = item.conversations[0]
        if conversation.text is not None:
            return [conversation.text[: _common(*(str(c.text) for c in item.conversations))]]
        given = max(conversation.num_given, 1)
        first = next(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant" and i >= given)
        return [m["content"] for m in conversation.messages[:first]]

    def content(self, item: Example) -> Iterable[str]:
        """Everything that makes it another example than others."""
        yield f"{item.uid}\x00{item.preferred}\x00{item.target}"
        for conversation in item.conversations:
            yield f"{conversation.num_given}\x00{conversation.text or ''}"
            yield from (f"{m['role']}\x00{m['content']}" for m in conversation.messages)

    def _check_special(self, conversation: Conversation, where: str) -> None:
        for message in conversation.messages:
            found = self._special_in(message["content"])
            if found is not None:
                raise BadRow(
                    "special token in a message",
                    f"{where}: the {message['role']}'s message contains {found!r}, which the model would take for the "
                    "token that its template puts between messages: remove it, or give such rows as `text`.",
                )

    def _target(self, row: Row, where: str) -> float | None:
        config = self._config
        if self._kind == "scored":
            return _number(column(row, config.score_key, where, "score_key"), config.score_key, where)
        if self._kind == "pair" and config.margin_key is not None and row.get(config.margin_key) is not None:
            return _number(row[config.margin_key], config.margin_key, where)
        return None


def _single(row: Row, config: ExampleColumns, where: str, kind: ExampleKind) -> Conversation:
    conversation = conversation_of_row(row, config, where)
    if kind == "supervised" or conversation.text is not None or conversation.num_given:
        return conversation
    # of a whole conversation, the last answer is what is judged
    return Conversation(messages=conversation.messages, num_given=len(conversation.messages) - 1)


def _pair(row: Row, config: ExampleColumns, where: str) -> tuple[Conversation, Conversation]:
    chosen = answered(row, config.chosen_key, "chosen_key", config, where)
    rejected = answered(row, config.rejected_key, "rejected_key", config, where)
    if (chosen.text is None) != (rejected.text is None):
        raise BadRow("wrong type", f"{where}: one answer is text and the other a list of chat messages: use one form.")
    if chosen == rejected:
        raise BadRow("equal sides", f"{where}: both answers are the same, so nothing can be learnt from them.")
    if chosen.text is not None and rejected.text is not None:
        if chosen.text[0] != rejected.text[0]:
            raise BadRow(
                "different prompts",
                f"{where}: the two texts begin differently, but what both begin with is what is asked: compare answers "
                "to the same, or name the prompt's column (prompt_key).",
            )
        return chosen, rejected
    a, b = chosen.messages, rejected.messages
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if any(side[common]["role"] != "assistant" for side in (a, b) if len(side) > common):
        raise BadRow(
            "different prompts",
            f"{where}: the two answers are to different prompts (message {common + 1} is not the assistant's): compare "
            "answers to the same.",
        )
    sides = [checked(Conversation(messages=side, num_given=common), where) for side in (a, b)]
    if common in (len(a), len(b)):
        raise BadRow("empty answer", f"{where}: one answer is the beginning of the other, with nothing of its own.")
    return sides[0], sides[1]


def _common(*texts: str) -> int:
    """Characters that all texts begin with."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else value


def _label(row: Row, config: ExampleColumns, where: str) -> bool:
    value = _plain(column(row, config.label_key, where, "label_key"))
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow(
            "label is not true or false",
            f"{where}: column '{config.label_key}' must be true or false, 1 or 0, got {short(value)}.",
        )
    return bool(value)


def _number(value: Any, key: str, where: str) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise BadRow("wrong type", f"{where}: column '{key}' must be a number, got {short(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except ValueError:  # a Decimal that signals
        number = math.nan
    if not math.isfinite(number):
        raise BadRow("not a finite number", f"{where}: column '{key}' is {short(value)}: give a finite number.")
    if abs(number) > LARGEST:
        raise BadRow(
            "too large a number",
            f"{where}: column '{key}' is {short(value)}: give numbers between -{LARGEST:g} and {LARGEST:g}.",
        )
    return number
