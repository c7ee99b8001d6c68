"""Lists of chat messages, in the formats of OpenAI, Anthropic, ShareGPT, axolotl, LLaMA-Factory and TRL.

    a list or its JSON text ─► each message: role, content or parts, reasoning, tool calls, marks ─► `ReadMessages`

Every field of a message with a value is read, may be ignored (`fields`), or is rejected by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from roll.data.cells import ROLES, BadRow, as_list, is_null, unicode_text
from roll.data.conversations.calls import decoded_json, read_calls
from roll.data.conversations.fields import IGNORED_MESSAGE_FIELDS, Fields
from roll.data.conversations.parts import Parts, read_parts
from roll.data.conversations.reasoning import FIELDS, one_reasoning, read_reasoning
from roll.errors import short
from roll.types import Message, Speaker, content_key

__all__ = ["MAX_MESSAGES", "MessageReader", "ReadMessages", "check_order", "check_text"]

MAX_MESSAGES = 1000
"""Most messages of one conversation: templates are rendered up to each answer, which takes quadratic time."""
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
"""Other names of roles, and the roles that they stand for."""
_TRAINED = ("train", "training", "trainable", "loss")
_KNOWN = (
    *("role", "content", "from", "value", "name", "tool_calls", "function_call", "tool_call_id", "weight", "masked"),
    *_TRAINED,
    *FIELDS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadMessages:
    """Messages, and the marks of single messages."""

    messages: tuple[Message, ...]
    marks: Mapping[int, bool] = field(default_factory=dict)
    """Whether to train on the answer at an index, if its message says so."""

    def after(self, before: Sequence[Message]) -> ReadMessages:
        """Return these messages behind others."""
        marks = {len(before) + place: mark for place, mark in self.marks.items()}
        return ReadMessages(messages=(*before, *self.messages), marks=marks)

    @property
    def untrained(self) -> frozenset[int]:
        """Indices of the answers that are context only."""
        return frozenset(place for place, mark in self.marks.items() if not mark)

    def as_context(self, where: str) -> tuple[Message, ...]:
        """Return the messages of a prompt, none of which is trained on.

        Raises:
            BadRow: A message is marked for training.
        """
        marked = next((place for place, mark in self.marks.items() if mark), None)
        if marked is not None:
            raise BadRow(
                "prompt to be learned",
                f"{where}: message {marked + 1} of the prompt is marked as to be learned, but a prompt never is: give "
                "the conversation as `messages`, or remove the mark.",
            )
        return self.messages


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageReader:
    """Reads lists of messages."""

    ignored: frozenset[str] = frozenset()
    """Names of fields that the configuration ignores."""
    drop_nulls: bool = False
    """Whether to leave out null arguments of tool calls, as the row's table adds the arguments of other rows."""

    def read(self, value: Any, key: str, where: str) -> ReadMessages:
        """Return the messages of a column.

        Args:
            value: A list (a tuple, an array) of messages, one message, or the JSON text of a list.
            key: The column's name, for messages.
            where: The row's place, for messages.

        Raises:
            BadRow: A message is malformed, or has a field that is not read.
        """
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = decoded_json(value, f"column '{key}'", where)
        value = [value] if isinstance(value, Mapping) else as_list(value)
        if isinstance(value, list | tuple) and len(value) > MAX_MESSAGES:
            raise BadRow(
                "too many messages",
                f"{where}: a conversation of {len(value):,} messages, at most {MAX_MESSAGES:,}: split it.",
            )
        if not isinstance(value, list | tuple) or not value:
            raise BadRow(
                "wrong type",
                f"{where}: column '{key}' must be text or a list of chat messages ({{role, content}}, roles "
                f"{', '.join(ROLES)}), got {short(value)}.",
            )
        messages: list[Message] = []
        marks: dict[int, bool] = {}
        for number, message in enumerate(value, 1):
            found, mark = self._messages(message, key, f"{where}, message {number}")
            for one in found:
                _check_not_empty(one, f"message {number}, of the {one.role},", where)
            if mark is not None:
                marks |= {len(messages) + i: mark for i, one in enumerate(found) if one.role == "assistant"}
            messages += found
        return ReadMessages(messages=tuple(messages), marks=marks)

    def _messages(self, value: Any, key: str, where: str) -> tuple[list[Message], bool | None]:
        """Return one message in the form of chat templates (tool results become separate messages), and its mark."""
        if not isinstance(value, Mapping):
            raise BadRow("wrong type", f"{where}: a chat message is {{role, content}}, got {short(value)}.")
        fields = Fields(value, self.ignored)
        if fields.names == {"role", "content"} and value["role"] in ROLES and isinstance(value["content"], str):
            check_text(value["content"], key, where)  # no other field is left to read
            return [Message(role=value["role"], content=value["content"])], None
        said_role, role = _role(fields, where)
        mark = _mark(fields, role, where)
        reasoning = read_reasoning(fields, where)
        calls = self._calls(fields, where)
        name = "content" if fields.take("content") is not None or "value" not in value else "value"
        fields.take("value") if name == "value" else None
        content: Any = as_list(value.get(name))
        if said_role == "function_call":
            calls += self._spelled_calls(content, where)
            content = ""
        parts = self._parts(content, bool(calls), where)
        calls += parts.calls
        if parts.reasoning:
            reasoning["content"] = "\n\n".join(parts.reasoning)
        message = Message(
            role=role,
            content=parts.text,
            reasoning=one_reasoning(reasoning, where) or None,
            tool_calls=tuple(calls),
            tool_call_id=_name(fields, "tool_call_id", where) if role == "tool" else None,
            name=_name(fields, "name", where),
        )
        if role != "assistant" and (message.reasoning or calls):
            raise BadRow("not the assistant's", f"{where}: only an assistant's message reasons or calls tools.")
        if parts.results and role not in ("user", "tool"):
            raise BadRow("unread content part", f"{where}: a tool's result is in a message of the {role}.")
        fields.check_all_read(IGNORED_MESSAGE_FIELDS, _KNOWN, "a message", where)
        for said in (parts.text, message.reasoning, message.name, *(result for _, result in parts.results)):
            check_text(str(said or ""), key, where)
        return _listed(message, parts), mark

    def _calls(self, fields: Fields, where: str) -> list[dict[str, Any]]:
        calls, single = fields.take("tool_calls"), fields.take("function_call")
        found = [] if calls is None else read_calls(calls, where, drop_nulls=self.drop_nulls)
        return found + ([] if single is None else self._spelled_calls(single, where))

    def _spelled_calls(self, value: Any, where: str) -> list[dict[str, Any]]:
        value = decoded_json(value, "a function call", where) if isinstance(value, str) else value
        return read_calls(value if isinstance(value, list | tuple) else [value], where, drop_nulls=self.drop_nulls)

    def _parts(self, content: Any, calls: bool, where: str) -> Parts:
        if isinstance(content, str):
            return Parts(text=content)
        if calls and (is_null(content) or content == []):
            return Parts()
        if not isinstance(content, list | tuple) or not content:
            raise BadRow("wrong type", f"{where}: `content` must be text, got {short(content)}.")
        return read_parts(content, self.ignored, where, drop_nulls=self.drop_nulls)


def _listed(message: Message, parts: Parts) -> list[Message]:
    results = [Message(role="tool", content=text, tool_call_id=call or None) for call, text in parts.results]
    return results if results and not parts.text else [*results, message]


def _role(fields: Fields, where: str) -> tuple[str, Speaker]:
    """Return the role as it is written, and the role that it stands for."""
    said = fields.take("role")
    said = fields.take("from") if said is None else said
    role = _ROLE_NAMES.get(said, said) if isinstance(said, str) else said
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown role", f"{where}: the role must be one of {', '.join(ROLES)}, got {short(said)}.")
    return str(said), cast(Speaker, role)


def _mark(fields: Fields, role: str, where: str) -> bool | None:
    """Return whether the message is marked for training or not; `None` without a mark.

    Raises:
        BadRow: The marks contradict each other, are not true or false, or mark a message that is not the assistant's.
    """
    found = {name: _truth(fields, name, where) for name in _TRAINED}
    masked = _truth(fields, "masked", where)
    found["masked"] = None if masked is None else not masked
    weight = fields.take("weight")
    if weight is not None and (isinstance(weight, str | bool) or weight not in (0, 1)):
        raise BadRow(
            "message with a weight",
            f"{where}: its `weight` must be 1 for an answer that is trained or 0 for one that is not, got "
            f"{short(weight)}.",
        )
    marks = {mark for mark in found.values() if mark is not None}
    marks |= {False} if weight is not None and not weight else set()
    if len(marks) > 1:
        said = ", ".join(f"`{name}`" for name, mark in found.items() if mark is not None)
        raise BadRow("contradictory marks", f"{where}: its marks ({said}) contradict each other.")
    mark = next(iter(marks), None)
    if mark and role != "assistant":
        raise BadRow(
            "message of others to be learned",
            f"{where}: the {role}'s message is marked as to be learned, but only an assistant's is.",
        )
    return mark


def _truth(fields: Fields, name: str, where: str) -> bool | None:
    value = fields.take(name)
    value = value.item() if isinstance(value, np.generic) else value
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow("wrong type", f"{where}: `{name}` must be true or false, got {short(value)}.")
    return bool(value)


def _name(fields: Fields, field_name: str, where: str) -> str | None:
    value = fields.take(field_name)
    if value is not None and not isinstance(value, str):
        raise BadRow("wrong type", f"{where}: `{field_name}` must be text, got {short(value)}.")
    return value


def check_text(text: str, key: str, where: str) -> None:
    """Check that a text has only valid characters.

    Raises:
        BadRow: The text has an unpaired surrogate or a NUL.
    """
    unicode_text(text, f"column '{key}'", where)
    if "\x00" in text:
        raise BadRow("NUL character", f"{where}: column '{key}' has a NUL character at {text.index(chr(0))}.")


def check_order(messages: Sequence[Message], where: str, *, answered: bool = True) -> None:
    """Check that the roles are in an order that can be rendered, and that no message is empty.

    Args:
        messages: The messages, at least one.
        where: The row's place, for messages.
        answered: Whether the last message must be an answer; else the conversation is a prompt, which may end with the
            start of one.

    Raises:
        BadRow: The order is wrong, or a message is empty.
    """
    roles = [message.role for message in messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    problem = None
    if "system" in spoken:
        problem = "a system message may only be the first"
    elif not spoken or spoken[0] != "user":
        problem = "the first message, after a system message, must be the user's"
    elif any(role == "tool" and before == "user" for before, role in pairwise(spoken)):
        problem = "a tool's message must follow the assistant's"
    elif answered and spoken[-1] != "assistant":
        problem = "the last message must be the assistant's: nothing answers it"
    elif not answered and (messages[-1].tool_calls or messages[-1].reasoning):
        problem = "an answer that is begun for the model must be text: write its reasoning or call into `content`"
    if problem is not None:
        raise BadRow("roles out of order", f"{where}: {problem} (the roles are {', '.join(roles[:8])}).")
    for message in messages:
        _check_not_empty(message, f"a message of the {message.role}", where)


def _check_not_empty(message: Message, which: str, where: str) -> None:
    """Check that a question or an answer is not empty.

    Raises:
        BadRow: The message is empty.
    """
    role = message.role
    if role in ("user", "assistant") and not content_key(message.content).strip() and not message.tool_calls:
        what = "answer" if role == "assistant" else "prompt"
        raise BadRow(f"empty {what}", f"{where}: {which} is empty: fill it in.")
