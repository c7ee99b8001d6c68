"""Reads rows as prompts: messages, the reference answer, and metadata for rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from roll.config.data import FileData, HuggingFaceData, PythonData
from roll.data.bad_rows import BadRowCollector
from roll.data.cells import BadRow, Row, check_unicode, read_column
from roll.data.conversations import (
    MessageReader,
    RowContext,
    RowView,
    apply_prompt_template,
    build_messages,
    check_media,
    check_order,
    list_media_columns,
    parse_prompt_text,
    prepend_system_message,
    read_context,
    read_media,
)
from roll.data.conversations.fields import UnsupportedMedia
from roll.data.conversations.messages import check_text
from roll.data.media import MediaReader, place_media
from roll.data.media_columns import MediaColumns
from roll.data.source import get_prompt_content
from roll.errors import DataError, InfraError, shorten
from roll.types import Message, Prompt, get_content_key

__all__ = ["PromptReader"]

TableConfig: TypeAlias = FileData | HuggingFaceData | PythonData
"""Sources whose rows have columns."""


class PromptReader:
    """A `RowReader` that converts rows to prompts.

    Args:
        config: The source's entry in the configuration.
        domain: The source's name.
        bad_rows: Receives the bad rows.
        pipeline: The pipeline's name, for messages.
        media: Reads images, audio and video; `None` rejects them.
    """

    def __init__(
        self,
        config: TableConfig,
        domain: str,
        bad_rows: BadRowCollector,
        pipeline: str = "",
        media: MediaReader | None = None,
    ) -> None:
        self._config, self._domain, self._bad_rows, self._pipeline = config, domain, bad_rows, pipeline
        self._media = media
        self.media_columns = MediaColumns(config)
        self.held_out, self.limit = config.held_out, config.limit

    def read(self, row: Row, key: str, location: str) -> Prompt:
        """Read one row as a prompt; see `RowReader.read`."""
        try:
            self.media_columns.record_row(row)
            return self._read_prompt(RowView(row, media=self._media), row, key, location)
        except UnsupportedMedia as error:
            raise error.with_cause(self._pipeline, reads_media=self._media is not None) from None
        except (DataError, InfraError):  # an infrastructure error, such as a full disk, is not the row's fault
            raise
        except Exception as error:  # rows from Python may be of classes that raise anything
            raise BadRow(
                "unreadable", f"{location}: the row cannot be read: {type(error).__name__}: {error}"
            ) from error

    def handle_error(self, error: DataError, location: str) -> None:
        """Record the error; all errors are reported at once."""
        self._bad_rows.add_error(error)

    def get_question(self, item: Prompt) -> Iterable[str]:
        """Return the contents of the prompt's messages."""
        return (get_content_key(message.content) for message in item.messages)

    def get_content(self, item: Prompt) -> Iterable[str]:
        """Return all content that distinguishes the prompt from other prompts."""
        return get_prompt_content(item)

    def _read_prompt(self, row: RowView, raw: Row, key: str, location: str) -> Prompt:
        """Convert a row to a prompt; columns other than prompt, answer and demonstration become its metadata."""
        config = self._config
        view = RowView(raw, config.ignored_fields)
        content = read_column(row, config.prompt_key, location, "prompt_key")
        context = read_context(view, config, location)
        messages, text = _read_messages(content, context, row, config, location)
        columns = () if row.media is None else list_media_columns(row, config)
        messages = place_media(messages, read_media(row, config, location), location, columns)
        self.media_columns.record_messages(messages)
        text = text if not any(message.media for message in messages) else None
        answer, expert = _read_answer(row, config, location), _read_demonstration(row, config, location)
        view.read |= row.read
        check_media(view, config, location)
        return Prompt(
            uid=f"{self._domain}/{key}",
            domain=self._domain,
            messages=messages,
            answer=answer,
            expert=expert,
            metadata={name: value for name, value in raw.items() if name not in row.read},
            tools=context.tools,
            template_kwargs=context.template_kwargs,
            text=text,
        )


def _read_messages(
    content: Any, context: RowContext, row: RowView, config: TableConfig, location: str
) -> tuple[tuple[Message, ...], str | None]:
    """Read the messages of a prompt; also return its text if it is a plain string, otherwise `None`."""
    key, text, messages = config.prompt_key, None, None
    if isinstance(content, str):
        check_text(content, key, location)
        found = parse_prompt_text(content)
        messages = found.messages if found else None
        content = found.raw_messages if found and found.raw_messages else content
    if isinstance(content, str) and messages is None:
        if not content.strip():
            raise BadRow(
                "empty prompt",
                f"{location}: column '{key}' must be a string or a list of chat messages, but is empty: fill it in, "
                "or remove the row.",
            )
        messages = build_messages(content, None, config.prompt_template)
        plain = context.is_empty and config.system_prompt is None and config.prompt_template == "{prompt}"
        text = content if plain else None
    else:
        if messages is None:
            reader = MessageReader(ignored=frozenset(config.ignored_fields), drop_nulls=row.drop_nulls, media=row.media)
            messages = reader.read(content, key, location).as_context(location)
        messages = apply_prompt_template(messages, config.prompt_template, location)
    system = messages[:1] if messages[0].role == "system" else ()
    messages = prepend_system_message((*system, *context.history, *messages[len(system) :]), context, config, location)
    check_order(messages, location, ends_with_answer=False)
    return messages, text


def _read_answer(row: RowView, config: TableConfig, location: str) -> str:
    if config.answer_key is None:
        return ""
    value = read_column(row, config.answer_key, location, "answer_key")
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, str | int | float) and not hasattr(value, "as_tuple"):  # a Decimal has `as_tuple`
        raise BadRow(
            "wrong type",
            f"{location}: column '{config.answer_key}' must be a string or a number, got {shorten(value)}.",
        )
    if not isinstance(value, str | int) and not math.isfinite(value):  # data frames write missing values as NaN
        raise BadRow(
            "empty answer",
            f"{location}: column '{config.answer_key}' is {value}: provide an answer, or remove the row.",
        )
    try:
        text = str(value)
    except ValueError:  # an integer of more than 4,300 digits
        raise BadRow(
            "wrong type",
            f"{location}: column '{config.answer_key}' has a number that is too long: provide it as a string.",
        ) from None
    text = check_unicode(text, f"column '{config.answer_key}'", location)
    if config.answer_pattern is not None:
        found = re.search(config.answer_pattern, text)
        if found is None:
            raise BadRow(
                "answer_pattern not found",
                f"{location}: answer_pattern {config.answer_pattern!r} does not match {shorten(text)}: correct the "
                "pattern, or remove the row.",
            )
        text = ((found.group(1) if found.re.groups else found.group(0)) or "").strip()
    comparing = [reward.type for reward in config.reward if reward.needs_answer]
    if comparing and not text.strip():
        raise BadRow(
            "empty answer",
            f"{location}: the answer is empty, but the reward '{comparing[0]}' requires a reference answer: fill it "
            "in, or choose a reward that does not require one.",
        )
    return text


def _read_demonstration(row: RowView, config: TableConfig, location: str) -> tuple[str, ...]:
    """Read a row's demonstration; empty if it has none."""
    if config.expert_key is None:
        return ()
    value = read_column(row, config.expert_key, location, "expert_key")
    if value is None or value == "":
        return ()
    if not isinstance(value, str):
        raise BadRow(
            "wrong type",
            f"{location}: column '{config.expert_key}' must be the text of an answer, or null for no answer, got "
            f"{shorten(value)}.",
        )
    return (check_unicode(value, f"column '{config.expert_key}'", location),)
