"""Content as a list of parts, in the formats of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.data.cells import BadRow, as_list
from roll.data.conversations.calls import function_call
from roll.data.conversations.fields import IGNORED_PART_FIELDS, MEDIA, Fields, UnconsumedMedia
from roll.errors import short

__all__ = ["Parts", "read_parts"]

_TEXTS = ("text", "input_text", "output_text")
_KNOWN = ("type", "text", "thinking", "name", "input", "tool_use_id", "content")


@dataclass(kw_only=True, slots=True)
class Parts:
    """The content of a message's parts."""

    text: str = ""
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[tuple[str, str]] = field(default_factory=list)
    """Tool results: the call's ID and the result."""


def read_parts(value: Sequence[Any], ignored: frozenset[str], where: str, *, drop_nulls: bool = False) -> Parts:
    """Return the content of the parts: joined texts, an assistant's reasoning and calls, tool results.

    Args:
        value: Texts, or objects with a `type`.
        ignored: Names of fields and types that the configuration ignores.
        where: The message's place, for messages.
        drop_nulls: See `roll.data.conversations.calls.function_call`.

    Raises:
        BadRow: A part is of another type, or its order would be lost.
    """
    parts = Parts()
    for part in value:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise BadRow("wrong type", f"{where}: a part of `content` must be text or an object, got {short(part)}.")
        _read_part(part, parts, ignored, where, drop_nulls)
    return parts


def _read_part(part: Mapping[str, Any], parts: Parts, ignored: frozenset[str], where: str, drop_nulls: bool) -> None:
    fields = Fields(part, ignored)
    kind = fields.take("type")
    if isinstance(kind, str) and kind in ignored:
        return
    if kind is None and "text" in part:
        kind = "text"
    if kind in _TEXTS:
        _check_order(not parts.calls, "text after a tool's call", where)
        parts.text += _text(fields.take("text"), part, where)
    elif kind == "thinking":
        _check_order(not (parts.calls or parts.text), "thoughts after text or a tool's call", where)
        parts.reasoning.append(_text(fields.take("thinking"), part, where))
    elif kind == "tool_use":
        call = fields.take("name"), fields.take("input"), fields.take("id")
        parts.calls.append(function_call(*call, where, drop_nulls=drop_nulls))
    elif kind == "tool_result":
        _check_order(not parts.text, "a tool's result after text", where)
        parts.results.append((str(fields.take("tool_use_id") or ""), _result(fields.take("content"), ignored, where)))
        if fields.take("is_error"):
            raise BadRow(
                "failed tool call", f"{where}: `is_error` has no place in chat templates: say it in `content`."
            )
    elif isinstance(kind, str) and kind in MEDIA | {"document"}:
        raise UnconsumedMedia(
            "pictures, sound or films",
            f"{where}: a part of `content` is of type {kind!r}",
            "Leave such rows out.",
        )
    else:
        raise BadRow(
            "unread content part",
            f"{where}: `content` must be text or parts of type text, thinking, tool_use or tool_result, got "
            f"{short(part)}.",
        )
    fields.check_all_read(IGNORED_PART_FIELDS, _KNOWN, "a content part", where)


def _text(value: Any, part: Any, where: str) -> str:
    value = "" if value is None and any(part.get(name) == "" for name in ("text", "thinking")) else value
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{where}: `content` must be text, got {short(part)}.")
    return value


def _result(value: Any, ignored: frozenset[str], where: str) -> str:
    value = as_list(value)
    if value is None or isinstance(value, str):
        return value or ""
    parts = read_parts(value, ignored, where) if isinstance(value, list | tuple) else None
    if parts is None or parts.reasoning or parts.calls or parts.results:
        raise BadRow("wrong type", f"{where}: a tool's result must be text, got {short(value)}.")
    return parts.text


def _check_order(deal_in_order: bool, what: str, where: str) -> None:
    if not deal_in_order:
        raise BadRow("parts out of order", f"{where}: {what} in one message cannot be rendered: split the message.")
