"""Detects columns that repeat other columns of the row in another format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll.data.cells import BadRow
from roll.data.conversations import MessageReader, ParsedMessages, parse_prompt_text
from roll.types import Conversation, Message, get_content_key, iter_texts, map_text

__all__ = ["is_repetition"]

_MAX_HEADER_LENGTH = 2_000
"""Maximum number of characters between two messages in rendered text, without tool calls."""
_TEMPLATE_MARK_PATTERN = re.compile(r"<[|\uff5c][^<>]{0,60}>|</?[A-Za-z][\w:.-]{0,30}>|<</?SYS>>|\[/?[A-Z_]{1,30}\]")
"""Matches the marks that chat templates put around messages."""
_HEADER_WORDS = frozenset(
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
"""Words that chat templates use in headers, in lower case."""
_ALPACA_PREAMBLE_PATTERN = re.compile(
    r"Below is an instruction that describes a task(?:, paired with an input that provides further context)?\. "
    r"Write a response that appropriately completes the request\."
)
"""The start of the text in Alpaca's rows, and in all data sets with its format."""
_WORD_PATTERN = re.compile(r"\w+")


def is_repetition(
    value: Any, conversations: Sequence[Conversation], reader: MessageReader, *, rendered: bool = False
) -> bool:
    """Return whether a column repeats, in another format, the conversations that were read from other columns.

    Args:
        value: The column's value: a string, or messages, which must agree in roles, order, calls, reasoning and marks.
        conversations: The conversations that were read.
        reader: A reader of messages.
        rendered: Whether the column may also be the whole conversation, rendered by any template.
    """
    if isinstance(value, str) and (found := parse_prompt_text(value)) and found.raw_messages:
        value = found.raw_messages
    if isinstance(value, str):
        texts = {"".join(text.split()) for c in conversations for text in (c.text, *_list_contents(c.messages)) if text}
        return "".join(value.split()) in texts or (rendered and any(_is_rendering(value, c) for c in conversations))
    try:
        read = reader.read(value, "", "")
    except BadRow:
        return False
    return any(_contains_messages(conversation, read) for conversation in conversations)


def _list_contents(messages: Sequence[Message]) -> list[str]:
    return [get_content_key(message.content) for message in messages]


def _contains_messages(conversation: Conversation, messages: ParsedMessages) -> bool:
    """Return whether messages occur in a conversation, in order, ignoring whitespace.

    A message that is context only must also be context only in the conversation.
    """
    rest = iter(enumerate(map(_remove_whitespace, conversation.messages)))
    for place, message in enumerate(map(_remove_whitespace, messages.messages)):
        same = next((there for there, other in rest if other == message), None)
        if same is None or (place in messages.untrained_messages and same not in conversation.untrained_messages):
            return False
    return True


def _remove_whitespace(message: Message) -> Message:
    """Return the message with all whitespace removed from its content."""
    return replace(message, content=map_text(message.content, lambda text: "".join(text.split())))


def _is_rendering(text: str, conversation: Conversation) -> bool:
    """Return whether a text is the rendered conversation: its messages in order, with only headers between them."""
    places = [place for place, character in enumerate(text) if not character.isspace()]
    squeezed, places = "".join(text.split()), [*places, len(text)]
    known = _HEADER_WORDS | _collect_header_words(conversation)
    position = 0
    for i, message in enumerate(conversation.messages):
        content = "".join("".join(iter_texts(message.content)).split())
        begin = squeezed.find(content, position)
        # The content may also occur by chance, such as "a" in a header, so all occurrences near the last message are
        # tried.
        while begin >= 0 and not (
            _is_at_word_boundaries(
                text, places[begin], places[begin + len(content) - 1] + 1 if content else places[begin]
            )
            and _is_header(text[places[position] : places[begin]], known)
        ):
            begin = squeezed.find(content, begin + 1) if begin - position < _MAX_HEADER_LENGTH else -1
        if begin >= 0:
            position = begin + len(content)
        elif i or message.role != "system":  # a template may leave out the system message
            return False
    return _is_header(text[places[position] :], known)


def _is_at_word_boundaries(text: str, begin: int, end: int) -> bool:
    """Return whether a part of a text starts and ends at word boundaries: `a` is not a part of `assistant`."""
    inside = [text[i - 1 : i + 1] for i in (begin, end) if 0 < i < len(text) and begin < end]
    return not any(pair.isalnum() for pair in inside)


def _is_header(text: str, known: frozenset[str]) -> bool:
    """Return whether a text between two messages is only a header with the next role."""
    text = _TEMPLATE_MARK_PATTERN.sub(" ", _ALPACA_PREAMBLE_PATTERN.sub(" ", " ".join(text.split())))
    return all(word.casefold().strip("_") in known for word in _WORD_PATTERN.findall(text))


def _collect_header_words(conversation: Conversation) -> frozenset[str]:
    """Collect the words of a conversation's calls, reasoning and tools, which templates write between messages."""
    around = [
        {name: value for name, value in message.to_dict().items() if name not in ("role", "content")}
        for message in conversation.messages
    ]
    if not any(around) and not conversation.tools:
        return frozenset()
    text = json.dumps([around, list(conversation.tools)], ensure_ascii=False, default=str)
    return frozenset(word.casefold().strip("_") for word in _WORD_PATTERN.findall(text))
