"""Adapts agents' conversations to the model's chat template.

Agents send system messages in the middle of a conversation, and several user messages in a row. Some templates render
all of these messages, some reject them, and some silently drop later system messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll.data import ChatRenderer
from roll.errors import DataError
from roll.types import Message, Part, iter_texts, join_content

__all__ = ["render_text"]


def render_text(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Render a conversation with the chat template, up to the start of the next answer.

    A system message after the first message becomes a user message if the template cannot render it at its position. If
    the template still rejects the conversation, consecutive messages of one role are joined; then images of tool
    results are moved to a user message after the results; as a last resort, the first system message is moved to the
    start of the user message.

    Raises:
        DataError: The template rejects the conversation in every form.
    """
    if any(message.role == "system" for message in messages[1:]) and not renderer.supports_late_system:
        messages = [*messages[:1], *(_to_user_message(message) for message in messages[1:])]
    try:
        return renderer.render_text(messages, tools)
    except DataError as error:
        rejected = error
    joined = _join_consecutive(messages)
    forms = (joined, _move_tool_images(messages), _join_consecutive(_convert_system_messages(joined)))
    for form in forms:
        if form != messages:
            try:
                return renderer.render_text(form, tools)
            except DataError:
                continue
    raise rejected


def _to_user_message(message: Message) -> Message:
    return replace(message, role="user") if message.role == "system" else message


def _convert_system_messages(messages: Sequence[Message]) -> list[Message]:
    return [_to_user_message(message) for message in messages]


def _move_tool_images(messages: Sequence[Message]) -> list[Message]:
    """Move the images of tool results to a following user message, for templates that ignore images in results."""
    said: list[Message] = []
    images: list[Part] = []
    for message in messages:
        if images and message.role != "tool":
            said.append(Message(role="user", content=tuple(images)))
            images = []
        if message.role == "tool" and message.media:
            images += message.media
            message = replace(message, content="".join(iter_texts(message.content)) or "[image]")
        said.append(message)
    return _join_consecutive([*said, *([Message(role="user", content=tuple(images))] if images else [])])


def _join_consecutive(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive user messages, and consecutive system messages; tool calls and results stay separate."""
    said: list[Message] = []
    for message in messages:
        last = said[-1] if said else None
        if last is not None and message.role in ("user", "system") and last.role == message.role:
            said[-1] = replace(last, content=join_content([last.content, message.content]))
        else:
            said.append(message)
    return said
