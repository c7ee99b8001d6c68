"""Prompts that are texts, and the user message built from one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.data.cells import BadRow
from roll.data.conversations.dialogs import dialog_messages
from roll.types import Message

__all__ = ["TextPrompt", "messages_of", "prompt_of_text", "with_prompt_template"]


def messages_of(text: str, system_prompt: str | None, template: str) -> tuple[Message, ...]:
    """Return the chat messages for the prompt `text`."""
    user = Message(role="user", content=template.replace("{prompt}", text))
    return (Message(role="system", content=system_prompt), user) if system_prompt else (user,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """A prompt's text that holds messages."""

    messages: tuple[Message, ...] | None = None
    """The messages of a written dialog."""
    listed: Sequence[Any] | None = None
    """The list of messages, if the text is JSON."""


def prompt_of_text(text: str) -> TextPrompt | None:
    """Parse a prompt's text that holds messages as JSON, or a dialog; return `None` for plain text."""
    start = text.lstrip()[:1]
    if start == "[" and '"' in text:
        try:
            listed = json.loads(text)
        except (ValueError, RecursionError):
            listed = None
        if (
            listed
            and isinstance(listed, list)
            and all(isinstance(m, dict) and {"role", "from"} & set(m) for m in listed)
        ):
            return TextPrompt(listed=listed)
    messages = dialog_messages(text) if start == "H" else None
    return None if messages is None else TextPrompt(messages=messages)


def with_prompt_template(
    messages: tuple[Message, ...], template: str, where: str, *, last: bool = True
) -> tuple[Message, ...]:
    """Return the messages, with `prompt_template` around the user's question.

    Args:
        messages: The messages of a prompt, or a whole conversation.
        template: A text with `{prompt}` in it.
        where: The row's place, for messages.
        last: Whether to put it around the last user message; otherwise there must be only one.

    Raises:
        BadRow: There are several user messages.
    """
    if template == "{prompt}":
        return messages
    places = [place for place, message in enumerate(messages) if message.role == "user"]
    if not places or (not last and len(places) > 1):
        raise BadRow(
            "prompt template",
            f"{where}: `prompt_template` is put around one message of the user's, but this conversation has "
            f"{len(places)}: write the template into the rows, and leave prompt_template out.",
        )
    place = places[-1]
    asked = replace(messages[place], content=template.replace("{prompt}", messages[place].text))
    return (*messages[:place], asked, *messages[place + 1 :])
