"""Convert agents' conversations to a form that the model's chat template accepts.

Agents send system messages in the middle of a conversation, and several user messages in a row. Templates differ: some
render all of them, some reject them, and some drop later system messages without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll.data import ChatRenderer
from roll.errors import DataError
from roll.types import Message, joined_content

__all__ = ["fitted_text"]


def fitted_text(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Return a conversation as the template renders it, up to the start of the next answer.

    A later system message becomes a user message if the template does not render it in place. If the template still
    rejects the conversation, consecutive messages of one role are joined, and then the first system message becomes the
    start of the user message.

    Raises:
        DataError: The template rejects every form.
    """
    if any(message.role == "system" for message in messages[1:]) and not renderer.takes_late_system:
        messages = [*messages[:1], *(_as_user(message) for message in messages[1:])]
    try:
        return renderer.text(messages, tools)
    except DataError as error:
        refused = error
    for form in (_joined(messages), _joined(_without_system(messages))):
        if form != messages:
            try:
                return renderer.text(form, tools)
            except DataError:
                continue
    raise refused


def _as_user(message: Message) -> Message:
    return replace(message, role="user") if message.role == "system" else message


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [_as_user(message) for message in messages]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of users and of the system into one; tool calls and results stay separate."""
    said: list[Message] = []
    for message in messages:
        last = said[-1] if said else None
        if last is not None and message.role in ("user", "system") and last.role == message.role:
            said[-1] = replace(last, content=joined_content([last.content, message.content]))
        else:
            said.append(message)
    return said
