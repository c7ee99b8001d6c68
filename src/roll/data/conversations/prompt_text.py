"""Prompts that are strings, and their conversion to messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.data.cells import BadRow
from roll.data.conversations.dialogs import parse_dialog
from roll.types import Message, fill_placeholder

__all__ = ["TextPrompt", "apply_prompt_template", "build_messages", "parse_prompt_text"]


def build_messages(text: str, system_prompt: str | None, template: str) -> tuple[Message, ...]:
    """Build the messages of a prompt: the user message from `template` and `text`, and a system message if given."""
    user = Message(role="user", content=template.replace("{prompt}", text))
    return (Message(role="system", content=system_prompt), user) if system_prompt else (user,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """A prompt string that contains messages."""

    messages: tuple[Message, ...] | None = None
    """The messages, if the string is a dialog (`Human: …`)."""
    raw_messages: Sequence[Any] | None = None
    """The list of messages, not parsed yet, if the string is JSON."""


def parse_prompt_text(text: str) -> TextPrompt | None:
    """Parse a prompt string that contains messages, as JSON or as a dialog; return `None` for plain text."""
    start = text.lstrip()[:1]
    if start == "[" and '"' in text:
        try:
            raw_messages = json.loads(text)
        except (ValueError, RecursionError):  # a user's text may begin with a bracket, or nest too deeply to parse
            raw_messages = None
        if (
            raw_messages
            and isinstance(raw_messages, list)
            and all(isinstance(m, dict) and {"role", "from"} & set(m) for m in raw_messages)
        ):
            return TextPrompt(raw_messages=raw_messages)
    messages = parse_dialog(text) if start == "H" else None
    return None if messages is None else TextPrompt(messages=messages)


def apply_prompt_template(
    messages: tuple[Message, ...], template: str, location: str, *, allow_several: bool = True
) -> tuple[Message, ...]:
    """Apply `prompt_template` to the user's question, and return all messages.

    Args:
        messages: The messages of a prompt, or a whole conversation.
        template: A string with `{prompt}` in it.
        location: The row's location, for messages.
        allow_several: Whether several user messages are allowed; the template is then applied to the last one.

    Raises:
        BadRow: There is no user message, or there are several and `allow_several` is false.
    """
    if template == "{prompt}":
        return messages
    indices = [index for index, message in enumerate(messages) if message.role == "user"]
    if not indices or (not allow_several and len(indices) > 1):
        raise BadRow(
            "prompt template",
            f"{location}: `prompt_template` requires exactly one user message, got {len(indices)}: write the template "
            "into the rows, and remove prompt_template.",
        )
    index = indices[-1]
    user = replace(messages[index], content=fill_placeholder(template, "{prompt}", messages[index].content))
    return (*messages[:index], user, *messages[index + 1 :])
