"""Reads a model's reasoning before an answer from the fields that inference services and data sets use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.data.cells import BadRow, as_list
from roll.data.conversations.fields import IGNORED_PART_FIELDS, UnreadFields
from roll.errors import shorten

__all__ = ["REASONING_FIELDS", "merge_reasoning", "read_reasoning"]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Names of reasoning fields: text (DeepSeek and vLLM; OpenRouter; Ollama and TRL), lists (OpenRouter; Anthropic)."""
_TEXT_FIELDS = {
    "reasoning.text": "text",
    "reasoning.summary": "summary",
    "thinking": "thinking",
    "text": "text",
    "summary_text": "text",
}


def read_reasoning(fields: UnreadFields, location: str) -> dict[str, str]:
    """Read the text of each reasoning field of a message, by field name.

    Raises:
        BadRow: A field is not a string, or is encrypted.
    """
    found: dict[str, str] = {}
    for name in REASONING_FIELDS:
        value = fields.pop(name)
        if isinstance(value, list | tuple):
            value = "\n\n".join(_read_detail(detail, name, location) for detail in value)
        if value is None:
            continue
        if not isinstance(value, str):
            raise BadRow("wrong type", f"{location}: `{name}` must be a string, got {shorten(value)}.")
        found[name] = value
    return found


def merge_reasoning(reasoning: Mapping[str, str], location: str) -> str | None:
    """Merge the reasoning fields of a message, which may repeat each other; return `None` if there are no fields.

    Args:
        reasoning: The text of each field, by field name.
        location: The message's location, for messages.

    Raises:
        BadRow: The fields have different texts.
    """
    # Services repeat the reasoning in several fields, with different whitespace, for clients of different APIs.
    texts = {name: text for name, text in reasoning.items() if text.strip()}
    if len({"".join(text.split()) for text in texts.values()}) > 1:
        raise BadRow("conflicting reasoning", f"{location}: the reasoning fields {', '.join(texts)} differ: keep one.")
    return next(iter(texts.values()), None)


def _read_detail(value: Any, name: str, location: str) -> str:
    if not isinstance(value, Mapping):
        raise BadRow(
            "wrong type",
            f"{location}: `{name}` must be a string, or a list of objects with text, got {shorten(value)}.",
        )
    fields = UnreadFields(value)
    kind = fields.pop("type")
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    text = as_list(fields.pop(field)) if field else None
    if not isinstance(text, str):
        raise BadRow(
            "unreadable reasoning",
            f"{location}: `{name}` has an entry of type {shorten(kind)}, which has no readable text.",
        )
    fields.check_all_read(IGNORED_PART_FIELDS, ("type", "text", "summary", "thinking"), f"`{name}`", location)
    return text
