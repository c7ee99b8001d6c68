"""Conversations written as `Human: …` and `Assistant: …`, as in Anthropic's hh-rlhf."""

from __future__ import annotations

import re

from roll.types import Message

__all__ = ["parse_dialog"]

_SPEAKER_PATTERN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def parse_dialog(text: str) -> tuple[Message, ...] | None:
    r"""Parse the messages of a dialog; return `None` if the text is not a dialog.

    A dialog starts with `Human:`, and has an `Assistant:` after a blank line. A final `Assistant:` without text is not
    a message.

    >>> parse_dialog("\n\nHuman: 1 + 1?\n\nAssistant: 2")
    (Message(role='user', content='1 + 1?'), Message(role='assistant', content='2'))
    """
    text = text.strip()
    if not text.startswith("Human:") or "\n\nAssistant:" not in text:
        return None
    _, *pieces = _SPEAKER_PATTERN.split(text)
    messages: list[Message] = [
        Message(role="user" if speaker == "Human" else "assistant", content=content.strip())
        for speaker, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if messages[-1] == Message(role="assistant", content=""):
        messages.pop()
    return tuple(messages)
