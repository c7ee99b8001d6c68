"""Conversations as agents write them, brought into a form that the model's chat template takes.

Agents let the system speak in the midst of a conversation, and users several times in a row. Templates differ: some
write all of it, some refuse it, and some leave out what the system says later, without an error.
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
    """Return a conversation as the template writes it, up to where the next answer begins.

    What the system says later becomes a user's message where the template does not write it in its place. Where the
    template still refuses the conversation, messages of one role that follow each other become one, and then what the
    system says first becomes the beginning of the user's message.

    Raises:
        DataError: the template refuses it in every form.
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
