"""Reads lists of chat messages in the formats of OpenAI, Anthropic, ShareGPT, axolotl, LLaMA-Factory and TRL.

    a list or its JSON text ─► each message: role, content or parts, reasoning, tool calls, marks ─► `ParsedMessages`

Every field of a message that has a value is read, ignored (see `fields`), or rejected with an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from roll.data.cells import ROLES, BadRow, as_list, check_unicode, is_null
from roll.data.conversations.calls import decode_json, read_calls
from roll.data.conversations.fields import IGNORED_MESSAGE_FIELDS, UnreadFields
from roll.data.conversations.parts import MessageContent, read_parts
from roll.data.conversations.reasoning import REASONING_FIELDS, merge_reasoning, read_reasoning
from roll.data.media import MediaReader
from roll.errors import shorten
from roll.types import Message, Speaker, get_content_key

__all__ = ["MAX_MESSAGES", "MessageReader", "ParsedMessages", "check_order", "check_text"]

MAX_MESSAGES = 1000
"""Maximum number of messages: the template is rendered up to each answer, which takes quadratic time."""
_ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Maps other names of roles to the standard roles."""
_TRAIN_FLAGS = ("train", "training", "trainable", "loss")
_KNOWN_FIELDS = (
    *("role", "content", "from", "value", "name", "tool_calls", "function_call", "tool_call_id", "weight", "masked"),
    *_TRAIN_FLAGS,
    *REASONING_FIELDS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedMessages:
    """The messages of a row, and their marks for training."""

    messages: tuple[Message, ...]
    marks: Mapping[int, bool] = field(default_factory=dict)
    """For each message with a training mark, by its index: True if the answer is trained on."""

    def prepend(self, messages: Sequence[Message]) -> ParsedMessages:
        """Prepend messages that have no training marks, and return all messages."""
        marks = {len(messages) + place: mark for place, mark in self.marks.items()}
        return ParsedMessages(messages=(*messages, *self.messages), marks=marks)

    @property
    def untrained_messages(self) -> frozenset[int]:
        """Indices of the answers that are context only."""
        return frozenset(place for place, mark in self.marks.items() if not mark)

    def as_context(self, location: str) -> tuple[Message, ...]:
        """Check that no message is marked for training, and return the messages as a prompt.

        Raises:
            BadRow: A message is marked for training.
        """
        marked = next((place for place, mark in self.marks.items() if mark), None)
        if marked is not None:
            raise BadRow(
                "prompt marked for training",
                f"{location}: message {marked + 1} of the prompt is marked for training, but prompts are not trained "
                "on: provide the conversation as `messages`, or remove the mark.",
            )
        return self.messages


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageReader:
    """Reads lists of messages."""

    ignored: frozenset[str] = frozenset()
    """Names of fields that the configuration ignores."""
    drop_nulls: bool = False
    """If True, leave out null arguments of tool calls, because Arrow tables add the arguments of other rows."""
    media: MediaReader | None = None
    """Reads media of content parts; see `read_parts`."""

    def read(self, value: Any, key: str, location: str) -> ParsedMessages:
        """Read the messages in a column.

        Args:
            value: A list, tuple or array of messages, a single message, or a list as a JSON string.
            key: The column's name, for messages.
            location: The row's location, for messages.

        Raises:
            BadRow: A message is malformed, or has a field that is not read.
        """
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = decode_json(value, f"column '{key}'", location)
        value = [value] if isinstance(value, Mapping) else as_list(value)
        if isinstance(value, list | tuple) and len(value) > MAX_MESSAGES:
            raise BadRow(
                "too many messages",
                f"{location}: the conversation has {len(value):,} messages, but at most {MAX_MESSAGES:,} are "
                "supported: split it.",
            )
        if not isinstance(value, list | tuple) or not value:
            raise BadRow(
                "wrong type",
                f"{location}: column '{key}' must be a string or a list of chat messages ({{role, content}}, roles "
                f"{', '.join(ROLES)}), got {shorten(value)}.",
            )
        messages: list[Message] = []
        marks: dict[int, bool] = {}
        for number, message in enumerate(value, 1):
            read, mark = self._read_message(message, key, f"{location}, message {number}")
            for each in read:
                _check_not_empty(each, f"message {number} ({each.role})", location)
            if mark is not None:
                marks |= {len(messages) + i: mark for i, each in enumerate(read) if each.role == "assistant"}
            messages += read
        return ParsedMessages(messages=tuple(messages), marks=marks)

    def _read_message(self, value: Any, key: str, location: str) -> tuple[list[Message], bool | None]:
        """Convert one message of a row to chat template messages, and return them with the message's training mark.

        Tool results in the message become separate messages. The mark is `None` if the message has none.
        """
        if not isinstance(value, Mapping):
            raise BadRow("wrong type", f"{location}: a chat message must be {{role, content}}, got {shorten(value)}.")
        fields = UnreadFields(value, self.ignored)
        if fields.names == {"role", "content"} and value["role"] in ROLES and isinstance(value["content"], str):
            check_text(value["content"], key, location)  # no other field is left to read
            return [Message(role=value["role"], content=value["content"])], None
        written_role, role = _read_role(fields, location)
        mark = _read_train_flag(fields, role, location)
        reasoning = read_reasoning(fields, location)
        calls = self._read_calls(fields, location)
        name = "content" if fields.pop("content") is not None or "value" not in value else "value"
        fields.pop("value") if name == "value" else None
        content: Any = as_list(value.get(name))
        if written_role == "function_call":  # ShareGPT: the content of such a message is the call, as JSON
            calls += self._parse_calls(content, location)
            content = ""
        parts = self._read_content(content, bool(calls), location)
        calls += parts.calls
        if parts.reasoning:
            reasoning["content"] = "\n\n".join(parts.reasoning)
        message = Message(
            role=role,
            content=parts.text,
            reasoning=merge_reasoning(reasoning, location) or None,
            tool_calls=tuple(calls),
            tool_call_id=_read_name(fields, "tool_call_id", location) if role == "tool" else None,
            name=_read_name(fields, "name", location),
        )
        if role != "assistant" and (message.reasoning or calls):
            raise BadRow(
                "not the assistant's",
                f"{location}: a message with role '{role}' has reasoning or tool calls, which only assistant "
                "messages may have.",
            )
        if parts.results and role not in ("user", "tool"):
            raise BadRow(
                "unsupported content part",
                f"{location}: a tool result must be in a message with role 'user' or 'tool', not '{role}'.",
            )
        fields.check_all_read(IGNORED_MESSAGE_FIELDS, _KNOWN_FIELDS, "a message", location)
        for text in (parts.text, message.reasoning, message.name, *(result for _, result in parts.results)):
            check_text(str(text or ""), key, location)
        return _separate_results(message, parts), mark

    def _read_calls(self, fields: UnreadFields, location: str) -> list[dict[str, Any]]:
        calls, single = fields.pop("tool_calls"), fields.pop("function_call")
        found = [] if calls is None else read_calls(calls, location, drop_nulls=self.drop_nulls)
        return found + ([] if single is None else self._parse_calls(single, location))

    def _parse_calls(self, value: Any, location: str) -> list[dict[str, Any]]:
        value = decode_json(value, "a function call", location) if isinstance(value, str) else value
        return read_calls(value if isinstance(value, list | tuple) else [value], location, drop_nulls=self.drop_nulls)

    def _read_content(self, content: Any, has_calls: bool, location: str) -> MessageContent:
        if isinstance(content, str):
            return MessageContent(text=content)
        if has_calls and (is_null(content) or content == []):
            return MessageContent()
        if not isinstance(content, list | tuple) or not content:
            raise BadRow("wrong type", f"{location}: `content` must be a string, got {shorten(content)}.")
        return read_parts(content, self.ignored, location, drop_nulls=self.drop_nulls, media=self.media)


def _separate_results(message: Message, parts: MessageContent) -> list[Message]:
    results = [Message(role="tool", content=text, tool_call_id=call or None) for call, text in parts.results]
    return results if results and not parts.text else [*results, message]


def _read_role(fields: UnreadFields, location: str) -> tuple[str, Speaker]:
    """Read a message's role; return it as written in the row (`human`), and as the standard role (`user`).

    Raises:
        BadRow: The role is unknown.
    """
    written = fields.pop("role")
    written = fields.pop("from") if written is None else written
    role = _ROLE_NAMES.get(written, written) if isinstance(written, str) else written
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown role", f"{location}: the role must be one of {', '.join(ROLES)}, got {shorten(written)}.")
    return str(written), cast(Speaker, role)


def _read_train_flag(fields: UnreadFields, role: str, location: str) -> bool | None:
    """Read whether a message is marked for training; `None` if it has no mark.

    Raises:
        BadRow: The marks contradict each other, are not true or false, or mark a message whose role is not
            assistant.
    """
    found = {name: _read_boolean(fields, name, location) for name in _TRAIN_FLAGS}
    masked = _read_boolean(fields, "masked", location)
    found["masked"] = None if masked is None else not masked
    weight = fields.pop("weight")
    if weight is not None and (isinstance(weight, str | bool) or weight not in (0, 1)):
        raise BadRow(
            "message with a weight",
            f"{location}: `weight` must be 1 (train on the answer) or 0 (context only), got {shorten(weight)}.",
        )
    marks = {mark for mark in found.values() if mark is not None}
    marks |= {False} if weight is not None and not weight else set()
    if len(marks) > 1:
        names = ", ".join(f"`{name}`" for name, mark in found.items() if mark is not None)
        raise BadRow("contradictory marks", f"{location}: the fields {names} contradict each other: keep one.")
    mark = next(iter(marks), None)
    if mark and role != "assistant":
        raise BadRow(
            "message of another role marked for training",
            f"{location}: the {role} message is marked for training, but only assistant messages can be trained on.",
        )
    return mark


def _read_boolean(fields: UnreadFields, name: str, location: str) -> bool | None:
    value = fields.pop(name)
    value = value.item() if isinstance(value, np.generic) else value
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow("wrong type", f"{location}: `{name}` must be true or false, got {shorten(value)}.")
    return bool(value)


def _read_name(fields: UnreadFields, field_name: str, location: str) -> str | None:
    value = fields.pop(field_name)
    if value is not None and not isinstance(value, str):
        raise BadRow("wrong type", f"{location}: `{field_name}` must be a string, got {shorten(value)}.")
    return value


def check_text(text: str, key: str, location: str) -> None:
    """Check that a string has only valid characters.

    Raises:
        BadRow: The string has an unpaired surrogate or a NUL.
    """
    check_unicode(text, f"column '{key}'", location)
    if "\x00" in text:
        raise BadRow(
            "NUL character",
            f"{location}: column '{key}' has a NUL character at position {text.index(chr(0))}: remove it.",
        )


def check_order(messages: Sequence[Message], location: str, *, ends_with_answer: bool = True) -> None:
    """Check that chat templates support the order of the roles, and that no message is empty.

    Args:
        messages: The messages, at least one.
        location: The row's location, for messages.
        ends_with_answer: Whether the last message must be an answer; if not, the conversation is a prompt, which may
            end with the start of an answer.

    Raises:
        BadRow: The order is wrong, or a message is empty.
    """
    roles = [message.role for message in messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    problem = None
    if "system" in spoken:
        problem = "only the first message can be a system message"
    elif not spoken or spoken[0] != "user":
        problem = "the first message after the system message must be a user message"
    elif any(role == "tool" and before == "user" for before, role in pairwise(spoken)):
        problem = "a tool message must follow an assistant message"
    elif ends_with_answer and spoken[-1] != "assistant":
        problem = "the last message must be an assistant message"
    elif not ends_with_answer and (messages[-1].tool_calls or messages[-1].reasoning):
        problem = "the start of an answer (prefill) must be plain text: write its reasoning or tool call into `content`"
    if problem is not None:
        raise BadRow("roles out of order", f"{location}: {problem} (the roles are {', '.join(roles[:8])}).")
    for message in messages:
        _check_not_empty(message, f"a message with the role '{message.role}'", location)


def _check_not_empty(message: Message, label: str, location: str) -> None:
    """Check that a question or an answer is not empty.

    Raises:
        BadRow: The message is empty.
    """
    role = message.role
    if role in ("user", "assistant") and not get_content_key(message.content).strip() and not message.tool_calls:
        noun = "answer" if role == "assistant" else "prompt"
        raise BadRow(f"empty {noun}", f"{location}: {label} is empty: fill it in.")
