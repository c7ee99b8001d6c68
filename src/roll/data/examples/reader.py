"""Reads rows as examples of the type that a pipeline trains on, and records bad rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np

from roll.config.examples import ExampleColumns
from roll.data.bad_rows import BadRowCollector
from roll.data.cells import BadRow, Row, read_column
from roll.data.conversations import MessageReader, RowView, check_columns, list_media_columns, read_media
from roll.data.conversations.fields import UnsupportedMedia
from roll.data.examples.conversations import RowParser
from roll.data.examples.repeated_columns import is_repetition
from roll.data.media import MEDIA_NOUNS, MediaReader, describe_marks, hint_at_missing_media, place_media
from roll.data.media_columns import MediaColumns
from roll.data.source import get_message_content, get_message_texts, get_template_inputs, get_tool_texts
from roll.errors import DataError, InfraError, shorten
from roll.types import Conversation, Example, get_content_key

__all__ = ["ExampleKind", "ExampleReader"]

MAX_ABS_VALUE = 1e18
"""Largest absolute value of a score or margin; a loss computes its square in float32."""
ExampleKind: TypeAlias = Literal["supervised", "pair", "labelled", "scored"]
"""One conversation; two answers to the same prompt, the preferred one first; one answer that is labeled desirable or
undesirable; one answer with a score."""


class ExampleReader:
    """Reads rows as examples of one type; a `RowReader`.

    Args:
        config: The source's entry in the configuration.
        domain: The source's name.
        kind: The type of examples.
        find_special_token: Returns the first special token in a string, or `None`.
        bad_rows: Receives the bad rows.
        pipeline: The pipeline's name, for messages.
        media: Reads images, audio and video; `None` rejects them.
    """

    def __init__(
        self,
        config: ExampleColumns,
        domain: str,
        kind: ExampleKind,
        find_special_token: Callable[[str], str | None],
        bad_rows: BadRowCollector,
        pipeline: str = "",
        media: MediaReader | None = None,
    ) -> None:
        self._media = media
        self.media_columns = MediaColumns(config)
        self._config, self._domain, self._kind, self._pipeline = config, domain, kind, pipeline
        self._special_in = find_special_token
        self.held_out, self.limit = config.held_out, config.limit
        self._bad_rows = bad_rows
        self._columns = {getattr(config, name) for name in type(config).model_fields if name.endswith("_key")} - {None}

    def read(self, row: Row, key: str, location: str) -> Example:
        """Read one row as an example; see `RowReader.read`."""
        try:
            self.media_columns.record_row(row)
            return self._read_example(row, key, location)
        except UnsupportedMedia as error:
            raise error.with_cause(self._pipeline, reads_media=self._media is not None) from None
        except (DataError, InfraError):  # an infrastructure error, such as a full disk, is not the row's fault
            raise
        except Exception as error:  # rows from Python may be of classes that raise anything
            raise BadRow(
                "unreadable", f"{location}: the row cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _read_example(self, raw: Row, key: str, location: str) -> Example:
        config = self._config
        row = RowView(raw, config.ignored_fields, self._media)
        reading = RowParser(row, config, location)
        conversations = (
            _read_pair(reading, config, location)
            if self._kind == "pair"
            else (_select_last_answer(reading.read_conversation(), self._kind),)
        )
        conversations = self._with_media(row, conversations, location)
        for conversation in conversations:
            _check_marks(conversation, self._kind, location)
            self._check_special_tokens(conversation, location)
        example = Example(
            uid=f"{self._domain}/{key}",
            domain=self._domain,
            conversations=conversations,
            preferred=_read_label(row, config, location) if self._kind == "labelled" else None,
            target=self._read_target(row, location),
            metadata={name: row.peek(name) for name in row if name not in self._columns},
        )
        self._check_columns(row, conversations, location)
        return example

    def _with_media(
        self, row: RowView, conversations: tuple[Conversation, ...], location: str
    ) -> tuple[Conversation, ...]:
        """Insert the row's media into its conversations; both conversations of a pair get the same media."""
        if row.media is None:
            return conversations
        media, columns = read_media(row, self._config, location), list_media_columns(row, self._config)
        if media and any(conversation.text is not None for conversation in conversations):
            kind = media[0].kind
            raise BadRow(
                kind,
                f"{location}: the row has {kind}, which requires messages, but its prompt is plain text: provide "
                "`messages`.",
            )
        placed = tuple(
            conversation
            if conversation.text is not None
            else replace(conversation, messages=place_media(conversation.messages, media, location, columns))
            for conversation in conversations
        )
        for conversation in placed:
            _check_answers(conversation, location)
            self.media_columns.record_messages(conversation.messages)
        return placed

    def _check_columns(self, row: RowView, conversations: tuple[Conversation, ...], location: str) -> None:
        """Check that every column was read; a column that repeats other columns in another format is treated as
        read."""
        config = self._config
        if self._kind != "pair" and config.completion_key in (config.chosen_key, config.rejected_key):
            row.read |= {config.chosen_key, config.rejected_key}  # the configuration selects one of the two answers
        forms = {
            *(config.messages_key, config.conversations_key, config.prompt_key, config.completion_key),
            *(config.instruction_key, config.input_key, config.output_key, config.text_key),
            *(config.chosen_key, config.rejected_key),
        }
        reader = MessageReader(ignored=frozenset(config.ignored_fields), drop_nulls=row.drop_nulls)
        row.read |= {
            name
            for name in row.list_unread_columns()
            if name in forms and is_repetition(row.peek(name), conversations, reader, rendered=name == config.text_key)
        }
        check_columns(row, config, self._columns, location)

    def handle_error(self, error: DataError, location: str) -> None:
        """Record the error; all errors are reported at once."""
        self._bad_rows.add_error(error)

    def get_question(self, item: Example) -> Iterable[str]:
        """Return the messages before the first answer; for plain text, the text or the common prefix of a pair."""
        conversation = item.conversations[0]
        if conversation.text is not None:
            # The prompt of a plain-text pair is not marked: it is their common prefix.
            return [conversation.text[: _compute_common_prefix(*(str(c.text) for c in item.conversations))]]
        given = max(conversation.num_prompt_messages, 1)
        first = next(i for i, m in enumerate(conversation.messages) if m.role == "assistant" and i >= given)
        return [get_content_key(m.content) for m in conversation.messages[:first]]

    def get_content(self, item: Example) -> Iterable[str]:
        """Yield all content that distinguishes the example from other examples."""
        yield f"{item.uid}\x00{item.preferred}\x00{item.target}"
        for conversation in item.conversations:
            yield f"{conversation.num_prompt_messages}\x00{conversation.text or ''}"
            yield from map(get_message_content, conversation.messages)
            yield from get_template_inputs(conversation.tools, conversation.template_kwargs)
            if conversation.untrained_messages:
                yield f"untrained {sorted(conversation.untrained_messages)}"

    def _check_special_tokens(self, conversation: Conversation, location: str) -> None:
        # Rejected rather than escaped: in chat data, special tokens are mostly leftovers of another model's template,
        # which the model should not learn in any spelling.
        for message in conversation.messages:
            found = next(filter(None, map(self._special_in, get_message_texts(message))), None)
            if found is not None:
                raise BadRow(
                    "special token in a message",
                    f"{location}: the {message.role} message contains {found!r}, a special token of the chat "
                    "template: remove it, or provide such rows as `text`." + hint_at_missing_media(found),
                )
        found = next(filter(None, map(self._special_in, get_tool_texts(conversation.tools))), None)
        if found is not None:
            raise BadRow(
                "special token in a tool",
                f"{location}: a tool's description contains {found!r}, a special token of the model: remove it.",
            )

    def _read_target(self, row: RowView, location: str) -> float | None:
        config = self._config
        if self._kind == "scored":
            return _read_number(read_column(row, config.score_key, location, "score_key"), config.score_key, location)
        if self._kind == "pair" and config.margin_key is not None and row.get(config.margin_key) is not None:
            return _read_number(row[config.margin_key], config.margin_key, location)
        return None


def _select_last_answer(conversation: Conversation, kind: ExampleKind) -> Conversation:
    if kind == "supervised" or conversation.text is not None or conversation.num_prompt_messages:
        return conversation
    # The label or score of a whole conversation is that of its last answer.
    return replace(conversation, num_prompt_messages=len(conversation.messages) - 1)


def _check_marks(conversation: Conversation, kind: ExampleKind, location: str) -> None:
    """Check that at least one answer is trained on, and that no labeled, scored or compared answer is masked."""
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    if conversation.untrained_messages and conversation.untrained_messages.issuperset(
        i for i in answers if i >= conversation.num_prompt_messages
    ):
        raise BadRow(
            "nothing to learn",
            f"{location}: every answer is marked as context only: mark one for training, or remove the row.",
        )
    if kind != "supervised" and any(
        place >= conversation.num_prompt_messages for place in conversation.untrained_messages
    ):
        raise BadRow(
            "masked answer",
            f"{location}: a loss mask excludes the answer that the label, score or preference applies to: remove the "
            "mask, or remove the row.",
        )


def _check_answers(conversation: Conversation, location: str) -> None:
    """Check that no answer to train on has an image, audio or a video.

    Raises:
        BadRow: An answer has an image, audio or a video.
    """
    for place, message in enumerate(conversation.messages):
        trained = place >= conversation.num_prompt_messages and place not in conversation.untrained_messages
        if message.role == "assistant" and message.media and trained:
            kind = message.media[0].kind
            raise BadRow(
                kind,
                f"{location}: the assistant message {place + 1} has {MEDIA_NOUNS[kind]}, but the model generates only "
                f"text: move the {kind} into another message, or remove the row.",
            )


def _read_pair(parser: RowParser, config: ExampleColumns, location: str) -> tuple[Conversation, Conversation]:
    chosen = parser.read_answer(config.chosen_key, "chosen_key")
    rejected = parser.read_answer(config.rejected_key, "rejected_key")
    if (chosen.text is None) != (rejected.text is None):
        raise BadRow(
            "wrong type",
            f"{location}: one answer is a string and the other a list of chat messages: use the same form for both.",
        )
    if chosen == rejected:
        raise BadRow(
            "identical answers",
            f"{location}: both answers are identical: provide two different answers, or remove the row.",
        )
    if chosen.text is not None and rejected.text is not None:
        if chosen.text[0] != rejected.text[0]:
            raise BadRow(
                "different prompts",
                f"{location}: the two strings have no common prefix that could be the prompt: provide two answers to "
                "the same prompt, or set prompt_key to the prompt's column.",
            )
        return chosen, rejected
    a, b = chosen.messages, rejected.messages
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    other = next((side[common] for side in (a, b) if len(side) > common and side[common].role != "assistant"), None)
    if other is not None:
        content = shorten(describe_marks(get_content_key(other.content)))
        raise BadRow(
            "different prompts",
            f"{location}: the two answers have different prompts: only one of the two conversations contains this "
            f"{other.role} message: {content}. Provide two answers to the same prompt.",
        )
    sides = [
        parser.check(replace(side, num_prompt_messages=common), f"{location}, column '{key}'")
        for side, key in ((chosen, config.chosen_key), (rejected, config.rejected_key))
    ]
    if common in (len(a), len(b)):
        raise BadRow(
            "empty answer",
            f"{location}: one conversation is a prefix of the other, so the shorter one has no answer: fill it in, or "
            "remove the row.",
        )
    return sides[0], sides[1]


def _compute_common_prefix(*texts: str) -> int:
    """Return the length of the strings' common prefix, in characters."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)


def _to_python_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else value


def _read_label(row: RowView, config: ExampleColumns, location: str) -> bool:
    value = _to_python_number(read_column(row, config.label_key, location, "label_key"))
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow(
            "label is not true or false",
            f"{location}: column '{config.label_key}' must be true or false, 1 or 0, got {shorten(value)}.",
        )
    return bool(value)


def _read_number(value: Any, key: str, location: str) -> float:
    value = _to_python_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise BadRow("wrong type", f"{location}: column '{key}' must be a number, got {shorten(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except ValueError:  # a signaling Decimal
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(
            "not a finite number", f"{location}: column '{key}' must be a finite number, got {shorten(value)}."
        )
    if abs(number) > MAX_ABS_VALUE:
        raise BadRow(
            "too large a number",
            f"{location}: column '{key}' must be between -{MAX_ABS_VALUE:g} and {MAX_ABS_VALUE:g}, got "
            f"{shorten(value)}.",
        )
    return number
