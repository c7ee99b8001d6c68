"""Reads message content that is a list of parts, in the formats of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.data.cells import BadRow, as_list
from roll.data.conversations.calls import build_function_call
from roll.data.conversations.fields import IGNORED_PART_FIELDS, MEDIA_NAMES, MEDIA_TYPES, UnreadFields, UnsupportedMedia
from roll.data.media import MEDIA_FIELDS, MEDIA_NOUNS, MediaReader
from roll.errors import shorten
from roll.types import MediaKind

__all__ = ["MessageContent", "read_parts"]

_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "image_url", "source", "bytes", "base64", "data", "path", "url"),
    "audio": (*MEDIA_FIELDS["audio"], "sampling_rate"),
    "video": (*MEDIA_FIELDS["video"], "fps"),
}
"""Fields of a content part that contain or describe its medium."""
_KNOWN_FIELDS = ("type", "text", "thinking", "name", "input", "tool_use_id", "content")


@dataclass(kw_only=True, slots=True)
class MessageContent:
    """The content of a message, collected from its parts."""

    text: str = ""
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[tuple[str, str]] = field(default_factory=list)
    """Tool results, each as (ID of the call, result)."""


def read_parts(
    value: Sequence[Any],
    ignored: frozenset[str],
    location: str,
    *,
    drop_nulls: bool = False,
    media: MediaReader | None = None,
) -> MessageContent:
    """Read the parts of a message: joined text, an assistant's reasoning and tool calls, and tool results.

    Args:
        value: Strings, or objects with a `type`.
        ignored: Names of fields and types that the configuration ignores.
        location: The message's location, for messages.
        drop_nulls: Whether to leave out null arguments of tool calls, as in `calls.build_function_call`.
        media: Reads media. Each medium becomes a mark in the text, which `place_media` replaces. `None` rejects media.

    Raises:
        BadRow: A part has an unsupported type, or the order of the parts would be lost.
    """
    parts = MessageContent()
    for part in value:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise BadRow(
                "wrong type",
                f"{location}: a part of `content` must be a string or an object, got {shorten(part)}.",
            )
        _read_part(part, parts, ignored, location, drop_nulls, media)
    return parts


def _read_part(
    part: Mapping[str, Any],
    parts: MessageContent,
    ignored: frozenset[str],
    location: str,
    drop_nulls: bool,
    media: MediaReader | None,
) -> None:
    fields = UnreadFields(part, ignored)
    kind = fields.pop("type")
    if isinstance(kind, str) and kind in ignored:
        return
    if kind is None and "text" in part:
        kind = "text"
    if kind in _TEXT_TYPES:
        _check_order(not parts.calls, "text after a tool call", location)
        parts.text += _read_text(fields.pop("text"), part, location)
    elif kind == "thinking":
        _check_order(not (parts.calls or parts.text), "reasoning after text or a tool call", location)
        parts.reasoning.append(_read_text(fields.pop("thinking"), part, location))
    elif kind == "tool_use":
        call = fields.pop("name"), fields.pop("input"), fields.pop("id")
        parts.calls.append(build_function_call(*call, location, drop_nulls=drop_nulls))
    elif kind == "tool_result":
        _check_order(not parts.text, "a tool result after text", location)
        parts.results.append(
            (str(fields.pop("tool_use_id") or ""), _read_result(fields.pop("content"), ignored, location))
        )
        if fields.pop("is_error"):
            raise BadRow(
                "failed tool call",
                f"{location}: `is_error` is not supported by chat templates: write the error into `content`.",
            )
    elif media is not None and isinstance(kind, str) and (medium := _find_media_kind(kind)) is not None:
        _check_order(not parts.calls, f"{MEDIA_NOUNS[medium]} after a tool call", location)
        values = {name: value for name in _MEDIA_FIELDS[medium] if (value := fields.pop(name)) is not None}
        fields.pop("detail"), fields.pop("media_type")
        # Without a value, the medium is the next one of the row's column.
        value = next(iter(values.values()), None) if medium == "image" else values
        parts.text += media.mark(value, location, medium) if values else media.mark_next(medium)
    elif isinstance(kind, str) and kind in MEDIA_NAMES | {"document"}:
        raise UnsupportedMedia(
            "images, audio or video",
            f"{location}: a part of `content` is of type {kind!r}",
            "Remove such rows.",
        )
    else:
        raise BadRow(
            "unsupported content part",
            f"{location}: `content` must be a string or parts of type text, thinking, tool_use or tool_result, got "
            f"{shorten(part)}.",
        )
    fields.check_all_read(IGNORED_PART_FIELDS, _KNOWN_FIELDS, "a content part", location)


def _find_media_kind(type_name: str) -> MediaKind | None:
    """Return the media type of a part type; `None` for other parts."""
    return next((kind for kind, names in MEDIA_TYPES.items() if type_name in names), None)


def _read_text(value: Any, part: Any, location: str) -> str:
    value = "" if value is None and any(part.get(name) == "" for name in ("text", "thinking")) else value
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{location}: `content` must be a string, got {shorten(part)}.")
    return value


def _read_result(value: Any, ignored: frozenset[str], location: str) -> str:
    value = as_list(value)
    if value is None or isinstance(value, str):
        return value or ""
    parts = read_parts(value, ignored, location) if isinstance(value, list | tuple) else None
    if parts is None or parts.reasoning or parts.calls or parts.results:
        raise BadRow("wrong type", f"{location}: a tool result must be a string, got {shorten(value)}.")
    return parts.text


def _check_order(is_in_order: bool, label: str, location: str) -> None:
    # Templates render the parts of a message in one fixed order: reasoning, text, calls. Another order would be lost.
    if not is_in_order:
        raise BadRow("parts out of order", f"{location}: {label} in one message cannot be rendered: split the message.")
