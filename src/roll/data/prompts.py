"""Read rows as prompts: the question, the reference answer, and metadata for the rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from roll.config.data import FileData, HuggingFaceData, PythonData
from roll.data.bad_rows import BadRows
from roll.data.cells import BadRow, Row, column, unicode_text
from roll.data.conversations import (
    MessageReader,
    RowContext,
    RowView,
    check_media,
    check_order,
    messages_of,
    prompt_of_text,
    read_context,
    with_prompt_template,
    with_system,
)
from roll.data.conversations.fields import UnconsumedMedia
from roll.data.conversations.messages import check_text
from roll.data.source import content_of_prompt
from roll.errors import DataError, short
from roll.types import Message, Prompt, content_key

__all__ = ["PromptReader"]

TableConfig: TypeAlias = FileData | HuggingFaceData | PythonData
"""Sources whose rows have columns."""


class PromptReader:
    """Reads rows as prompts; a `RowReader`.

    Args:
        config: The entry of the configuration.
        domain: The source's name.
        bad: Receives the bad rows.
        pipeline: The pipeline's name, for messages.
    """

    def __init__(self, config: TableConfig, domain: str, bad: BadRows, pipeline: str = "") -> None:
        self._config, self._domain, self._bad, self._pipeline = config, domain, bad, pipeline
        self.held_out, self.limit = config.held_out, config.limit

    def read(self, row: Row, key: str, where: str) -> Prompt:
        """See `RowReader.read`."""
        try:
            return self._prompt(RowView(row), row, key, where)
        except UnconsumedMedia as error:
            raise error.by(self._pipeline) from None
        except DataError:
            raise
        except Exception as error:  # rows from Python may be of classes that raise anything
            raise BadRow("unreadable", f"{where}: cannot be read: {type(error).__name__}: {error}") from error

    def refuse(self, error: DataError, where: str) -> None:
        """Record the error; all errors are reported at once."""
        self._bad.refuse(error)

    def asked(self, item: Prompt) -> Iterable[str]:
        """Return the contents of the messages."""
        return (content_key(message.content) for message in item.messages)

    def content(self, item: Prompt) -> Iterable[str]:
        """See `content_of_prompt`."""
        return content_of_prompt(item)

    def _prompt(self, row: RowView, raw: Row, key: str, where: str) -> Prompt:
        """Return one row as a prompt; columns other than prompt, answer and demonstration become its metadata."""
        config = self._config
        view = RowView(raw, config.ignored_fields)
        content = column(row, config.prompt_key, where, "prompt_key")
        context = read_context(view, config, where)
        messages, text = _messages(content, context, row.drop_nulls, config, where)
        answer, expert = _answer(row, config, where), _expert(row, config, where)
        view.read |= row.read
        check_media(view, where)
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


def _messages(
    content: Any, context: RowContext, drop_nulls: bool, config: TableConfig, where: str
) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages of a prompt, and its text if the row has only a text."""
    key, text, messages = config.prompt_key, None, None
    if isinstance(content, str):
        check_text(content, key, where)
        found = prompt_of_text(content)
        messages = found.messages if found else None
        content = found.listed if found and found.listed else content
    if isinstance(content, str) and messages is None:
        if not content.strip():
            raise BadRow(
                "empty prompt",
                f"{where}: column '{key}' must be text or a list of chat messages, and is empty: fill it in, or leave "
                "the row out.",
            )
        messages = messages_of(content, None, config.prompt_template)
        plain = context.is_empty and config.system_prompt is None and config.prompt_template == "{prompt}"
        text = content if plain else None
    else:
        if messages is None:
            reader = MessageReader(ignored=frozenset(config.ignored_fields), drop_nulls=drop_nulls)
            messages = reader.read(content, key, where).as_context(where)
        messages = with_prompt_template(messages, config.prompt_template, where)
    own = messages[:1] if messages[0].role == "system" else ()
    messages = with_system((*own, *context.history, *messages[len(own) :]), context, config, where)
    check_order(messages, where, answered=False)
    return messages, text


def _answer(row: RowView, config: TableConfig, where: str) -> str:
    if config.answer_key is None:
        return ""
    value = column(row, config.answer_key, where, "answer_key")
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, str | int | float) and not hasattr(value, "as_tuple"):  # a Decimal has `as_tuple`
        raise BadRow(
            "wrong type", f"{where}: column '{config.answer_key}' must be text or a number, got {short(value)}."
        )
    if not isinstance(value, str | int) and not math.isfinite(value):  # data frames write missing values as NaN
        raise BadRow(
            "empty answer", f"{where}: column '{config.answer_key}' is {value}: give an answer, or leave the row out."
        )
    try:
        text = str(value)
    except ValueError:  # an integer of more than 4,300 digits
        raise BadRow(
            "wrong type", f"{where}: column '{config.answer_key}' is too long a number: give it as text."
        ) from None
    text = unicode_text(text, f"column '{config.answer_key}'", where)
    if config.answer_pattern is not None:
        found = re.search(config.answer_pattern, text)
        if found is None:
            raise BadRow(
                "answer_pattern not found",
                f"{where}: answer_pattern {config.answer_pattern!r} is not found in {short(text)}.",
            )
        text = ((found.group(1) if found.re.groups else found.group(0)) or "").strip()
    comparing = [reward.type for reward in config.reward if reward.needs_answer]
    if comparing and not text.strip():
        raise BadRow(
            "empty answer",
            f"{where}: the answer is empty, but the reward '{comparing[0]}' compares with it: fill it in, "
            "or choose a reward that needs none.",
        )
    return text


def _expert(row: RowView, config: TableConfig, where: str) -> tuple[str, ...]:
    """Return the demonstration; empty if the row has none."""
    if config.expert_key is None:
        return ()
    value = column(row, config.expert_key, where, "expert_key")
    if value is None or value == "":
        return ()
    if not isinstance(value, str):
        raise BadRow(
            "wrong type",
            f"{where}: column '{config.expert_key}' must be the text of an answer, or null where there is none, got "
            f"{short(value)}.",
        )
    return (unicode_text(value, f"column '{config.expert_key}'", where),)
