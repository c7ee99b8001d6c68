"""Detect columns that repeat in another form what was read of a row."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll.data.cells import BadRow
from roll.data.conversations import MessageReader, ReadMessages, prompt_of_text
from roll.types import Conversation, Message, content_key, with_texts

__all__ = ["repeats"]

_LONGEST_HEADER = 2_000
"""Most characters between two messages of a text, without tool calls."""
_MARKS = re.compile(r"<[|\uff5c][^<>]{0,60}>|</?[A-Za-z][\w:.-]{0,30}>|<</?SYS>>|\[/?[A-Z_]{1,30}\]")
"""Marks that chat templates put around messages."""
_ROLES = frozenset(
    (
        *(
            "system",
            "user",
            "assistant",
            "tool",
            "human",
            "ai",
            "bot",
            "gpt",
            "model",
            "chatbot",
            "prompter",
            "developer",
        ),
        *("instruction", "instructions", "input", "context", "prompt", "question", "query", "q", "a", "s"),
        *("response", "answer", "output", "completion", "reply", "final", "bos", "eos"),
    )
)
"""Words of headers, in lower case."""
_ALPACA = re.compile(
    r"Below is an instruction that describes a task(?:, paired with an input that provides further context)?\. "
    r"Write a response that appropriately completes the request\."
)
"""The start of the texts in Alpaca's rows, and of all data sets with its format."""
_WORD = re.compile(r"\w+")


def repeats(
    value: Any, conversations: Sequence[Conversation], reader: MessageReader, *, rendered: bool = False
) -> bool:
    """Return whether a column only repeats what was already read, in another form.

    Args:
        value: The column's value: a text, or messages, whose roles, order, calls, reasoning and marks count.
        conversations: The conversations that were read.
        reader: A reader of messages.
        rendered: Whether the column may be a text of the whole conversation, in any template.
    """
    if isinstance(value, str) and (found := prompt_of_text(value)) and found.listed:
        value = found.listed
    if isinstance(value, str):
        said = {"".join(said.split()) for c in conversations for said in (c.text, *_contents(c.messages)) if said}
        return "".join(value.split()) in said or (rendered and any(_is_rendering(value, c) for c in conversations))
    try:
        read = reader.read(value, "", "")
    except BadRow:
        return False
    return any(_has(conversation, read) for conversation in conversations)


def _contents(messages: Sequence[Message]) -> list[str]:
    return [content_key(message.content) for message in messages]


def _has(conversation: Conversation, read: ReadMessages) -> bool:
    """Return whether the messages are some of the conversation's, in its order, and none has more content."""
    rest = iter(enumerate(map(_squeeze, conversation.messages)))
    for place, message in enumerate(map(_squeeze, read.messages)):
        same = next((there for there, other in rest if other == message), None)
        if same is None or (place in read.untrained and same not in conversation.untrained):
            return False
    return True


def _squeeze(message: Message) -> Message:
    """Return the message without the whitespace of its content."""
    return replace(message, content=with_texts(message.content, lambda text: "".join(text.split())))


def _is_rendering(text: str, conversation: Conversation) -> bool:
    """Return whether a text is the conversation in some template: its messages in order, with only headers between."""
    places = [place for place, character in enumerate(text) if not character.isspace()]
    squeezed, places = "".join(text.split()), [*places, len(text)]
    known = _ROLES | _words_around_contents(conversation)
    position = 0
    for i, message in enumerate(conversation.messages):
        said = "".join(message.text.split())
        begin = squeezed.find(said, position)
        while begin >= 0 and not (
            _is_apart(text, places[begin], places[begin + len(said) - 1] + 1 if said else places[begin])
            and _is_header(text[places[position] : places[begin]], known)
        ):
            begin = squeezed.find(said, begin + 1) if begin - position < _LONGEST_HEADER else -1
        if begin >= 0:
            position = begin + len(said)
        elif i or message.role != "system":
            return False
    return _is_header(text[places[position] :], known)


def _is_apart(text: str, begin: int, end: int) -> bool:
    """Return whether a part of a text starts and ends at word boundaries: `a` is not a part of `assistant`."""
    inside = [text[i - 1 : i + 1] for i in (begin, end) if 0 < i < len(text) and begin < end]
    return not any(pair.isalnum() for pair in inside)


def _is_header(text: str, known: frozenset[str]) -> bool:
    """Return whether a text between two messages only names the next speaker."""
    text = _MARKS.sub(" ", _ALPACA.sub(" ", " ".join(text.split())))
    return all(word.casefold().strip("_") in known for word in _WORD.findall(text))


def _words_around_contents(conversation: Conversation) -> frozenset[str]:
    """Return the words of a conversation's calls, reasoning and tools, which templates write between its messages."""
    around = [
        {name: value for name, value in message.to_dict().items() if name not in ("role", "content")}
        for message in conversation.messages
    ]
    if not any(around) and not conversation.tools:
        return frozenset()
    text = json.dumps([around, list(conversation.tools)], ensure_ascii=False, default=str)
    return frozenset(word.casefold().strip("_") for word in _WORD.findall(text))
