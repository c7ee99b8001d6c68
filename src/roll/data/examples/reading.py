"""Read rows as examples of a pipeline's kind, and record bad rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np

from roll.config.examples import ExampleColumns
from roll.data.bad_rows import BadRows
from roll.data.cells import BadRow, Row, column
from roll.data.conversations import MessageReader, RowView, check_columns
from roll.data.conversations.fields import UnconsumedMedia
from roll.data.examples.conversations import RowReading
from roll.data.examples.repeated import repeats
from roll.data.source import content_of_message, content_of_rest, texts_in, texts_of_tools
from roll.errors import DataError, short
from roll.types import Conversation, Example, content_key

__all__ = ["ExampleKind", "ExampleReader"]

LARGEST = 1e18
"""Largest score or margin; a loss computes its square in float32."""
ExampleKind: TypeAlias = Literal["supervised", "pair", "labelled", "scored"]
"""One conversation; two answers to the same prompt, the preferred one first; one answer and whether it is wanted; one
answer and its score."""


class ExampleReader:
    """Reads rows as examples of one kind; a `RowReader`.

    Args:
        config: The entry of the configuration.
        domain: The source's name.
        kind: The kind of examples.
        special_in: Finds a special token in a text of a chat.
        bad: Receives the bad rows.
        pipeline: The pipeline's name, for messages.
    """

    def __init__(
        self,
        config: ExampleColumns,
        domain: str,
        kind: ExampleKind,
        special_in: Callable[[str], str | None],
        bad: BadRows,
        pipeline: str = "",
    ) -> None:
        self._config, self._domain, self._kind, self._pipeline = config, domain, kind, pipeline
        self._special_in = special_in
        self.held_out, self.limit = config.held_out, config.limit
        self._bad = bad
        self._columns = {getattr(config, name) for name in type(config).model_fields if name.endswith("_key")} - {None}

    def read(self, row: Row, key: str, where: str) -> Example:
        """See `RowReader.read`."""
        try:
            return self._example(row, key, where)
        except UnconsumedMedia as error:
            raise error.by(self._pipeline) from None
        except DataError:
            raise
        except Exception as error:  # rows from Python may be of classes that raise anything
            raise BadRow("unreadable", f"{where}: cannot be read: {type(error).__name__}: {error}") from error

    def _example(self, raw: Row, key: str, where: str) -> Example:
        config = self._config
        row = RowView(raw, config.ignored_fields)
        reading = RowReading(row, config, where)
        conversations = (
            _pair(reading, config, where) if self._kind == "pair" else (_single(reading.conversation(), self._kind),)
        )
        for conversation in conversations:
            _check_marks(conversation, self._kind, where)
            self._check_special(conversation, where)
        example = Example(
            uid=f"{self._domain}/{key}",
            domain=self._domain,
            conversations=conversations,
            preferred=_label(row, config, where) if self._kind == "labelled" else None,
            target=self._target(row, where),
            metadata={name: row.peek(name) for name in row if name not in self._columns},
        )
        self._check_columns(row, conversations, where)
        return example

    def _check_columns(self, row: RowView, conversations: tuple[Conversation, ...], where: str) -> None:
        """Check that no column is left unread; a column that repeats what was read in another form counts as read."""
        config = self._config
        if self._kind != "pair" and config.completion_key in (config.chosen_key, config.rejected_key):
            row.read |= {config.chosen_key, config.rejected_key}  # one of the two answers is chosen on purpose
        forms = {
            *(config.messages_key, config.conversations_key, config.prompt_key, config.completion_key),
            *(config.instruction_key, config.input_key, config.output_key, config.text_key),
            *(config.chosen_key, config.rejected_key),
        }
        reader = MessageReader(ignored=frozenset(config.ignored_fields), drop_nulls=row.drop_nulls)
        row.read |= {
            name
            for name in row.unread
            if name in forms and repeats(row.peek(name), conversations, reader, rendered=name == config.text_key)
        }
        check_columns(row, config, self._columns, where)

    def refuse(self, error: DataError, where: str) -> None:
        """Record the error; all errors are reported at once."""
        self._bad.refuse(error)

    def asked(self, item: Example) -> Iterable[str]:
        """Return the messages before the first answer, or the common prefix of the texts."""
        conversation = item.conversations[0]
        if conversation.text is not None:
            return [conversation.text[: _common(*(str(c.text) for c in item.conversations))]]
        given = max(conversation.num_given, 1)
        first = next(i for i, m in enumerate(conversation.messages) if m.role == "assistant" and i >= given)
        return [content_key(m.content) for m in conversation.messages[:first]]

    def content(self, item: Example) -> Iterable[str]:
        """Yield all content that distinguishes the example from others."""
        yield f"{item.uid}\x00{item.preferred}\x00{item.target}"
        for conversation in item.conversations:
            yield f"{conversation.num_given}\x00{conversation.text or ''}"
            yield from map(content_of_message, conversation.messages)
            yield from content_of_rest(conversation.tools, conversation.template_kwargs)
            if conversation.untrained:
                yield f"untrained {sorted(conversation.untrained)}"

    def _check_special(self, conversation: Conversation, where: str) -> None:
        # Refused rather than escaped: in chat data, special tokens are mostly leftovers of another model's template,
        # which the model should not learn in any spelling.
        for message in conversation.messages:
            found = next(filter(None, map(self._special_in, texts_in(message))), None)
            if found is not None:
                raise BadRow(
                    "special token in a message",
                    f"{where}: the {message.role}'s message contains {found!r}, which the model would take for the "
                    "token that its template puts between messages: remove it, or give such rows as `text`.",
                )
        found = next(filter(None, map(self._special_in, texts_of_tools(conversation.tools))), None)
        if found is not None:
            raise BadRow(
                "special token in a tool", f"{where}: a tool's description contains {found!r}: remove it from there."
            )

    def _target(self, row: RowView, where: str) -> float | None:
        config = self._config
        if self._kind == "scored":
            return _number(column(row, config.score_key, where, "score_key"), config.score_key, where)
        if self._kind == "pair" and config.margin_key is not None and row.get(config.margin_key) is not None:
            return _number(row[config.margin_key], config.margin_key, where)
        return None


def _single(conversation: Conversation, kind: ExampleKind) -> Conversation:
    if kind == "supervised" or conversation.text is not None or conversation.num_given:
        return conversation
    # of a whole conversation, the last answer is judged
    return replace(conversation, num_given=len(conversation.messages) - 1)


def _check_marks(conversation: Conversation, kind: ExampleKind, where: str) -> None:
    """Check that an answer is left to train on, and that no judged answer is marked as context only."""
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    if conversation.untrained and conversation.untrained.issuperset(i for i in answers if i >= conversation.num_given):
        raise BadRow("nothing to learn", f"{where}: every answer of it is marked as not to be learned.")
    if kind != "supervised" and any(place >= conversation.num_given for place in conversation.untrained):
        raise BadRow(
            "judged answer that is not to be learned",
            f"{where}: an answer that is judged is marked as not to be learned: remove the mark, or leave the row out.",
        )


def _pair(reading: RowReading, config: ExampleColumns, where: str) -> tuple[Conversation, Conversation]:
    chosen = reading.answered(config.chosen_key, "chosen_key")
    rejected = reading.answered(config.rejected_key, "rejected_key")
    if (chosen.text is None) != (rejected.text is None):
        raise BadRow("wrong type", f"{where}: one answer is text and the other a list of chat messages: use one form.")
    if chosen == rejected:
        raise BadRow("equal sides", f"{where}: both answers are the same, so there is nothing to learn from them.")
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
    other = next((side[common] for side in (a, b) if len(side) > common and side[common].role != "assistant"), None)
    if other is not None:
        raise BadRow(
            "different prompts",
            f"{where}: the two answers are to different prompts, since only one of them has this message of the "
            f"{other.role}: {short(content_key(other.content))}. Compare answers to the same.",
        )
    sides = [
        reading.checked(replace(side, num_given=common), f"{where}, column '{key}'")
        for side, key in ((chosen, config.chosen_key), (rejected, config.rejected_key))
    ]
    if common in (len(a), len(b)):
        raise BadRow("empty answer", f"{where}: one answer is the beginning of the other, with nothing of its own.")
    return sides[0], sides[1]


def _common(*texts: str) -> int:
    """Return the length of the texts' common prefix, in characters."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else value


def _label(row: RowView, config: ExampleColumns, where: str) -> bool:
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
    except ValueError:  # a signaling Decimal
        number = math.nan
    if not math.isfinite(number):
        raise BadRow("not a finite number", f"{where}: column '{key}' is {short(value)}: give a finite number.")
    if abs(number) > LARGEST:
        raise BadRow(
            "too large a number",
            f"{where}: column '{key}' is {short(value)}: give numbers between -{LARGEST:g} and {LARGEST:g}.",
        )
    return number
