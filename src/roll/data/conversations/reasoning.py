"""A model's reasoning before an answer, in the fields of services and data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.data.cells import BadRow, as_list
from roll.data.conversations.fields import IGNORED_PART_FIELDS, Fields
from roll.errors import short

__all__ = ["FIELDS", "one_reasoning", "read_reasoning"]

FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Fields of DeepSeek and vLLM, of OpenRouter, of Ollama and TRL; as lists of parts, of OpenRouter and of Anthropic."""
_TEXT_OF = {
    "reasoning.text": "text",
    "reasoning.summary": "summary",
    "thinking": "thinking",
    "text": "text",
    "summary_text": "text",
}


def read_reasoning(fields: Fields, where: str) -> dict[str, str]:
    """Return the texts of a message's reasoning fields by field name, and mark them as read.

    Raises:
        BadRow: A field is not text, or is encrypted.
    """
    found: dict[str, str] = {}
    for name in FIELDS:
        value = fields.take(name)
        if isinstance(value, list | tuple):
            value = "\n\n".join(_detail(detail, name, where) for detail in value)
        if value is None:
            continue
        if not isinstance(value, str):
            raise BadRow("wrong type", f"{where}: `{name}` must be text, got {short(value)}.")
        found[name] = value
    return found


def one_reasoning(found: Mapping[str, str], where: str) -> str | None:
    """Return the reasoning in one or several fields of a message; `None` without any.

    Args:
        found: The texts by the fields' names.
        where: The message's place, for messages.

    Raises:
        BadRow: The texts differ.
    """
    texts = {name: text for name, text in found.items() if text.strip()}
    if len({"".join(text.split()) for text in texts.values()}) > 1:
        raise BadRow(
            "two kinds of reasoning", f"{where}: its fields of reasoning ({', '.join(texts)}) differ: keep one."
        )
    return next(iter(texts.values()), None)


def _detail(value: Any, name: str, where: str) -> str:
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{where}: `{name}` must be text, or a list of objects with text in them.")
    fields = Fields(value)
    kind = fields.take("type")
    field = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    text = as_list(fields.take(field)) if field else None
    if not isinstance(text, str):
        raise BadRow(
            "unreadable reasoning",
            f"{where}: `{name}` holds an entry of type {short(kind)}, whose text is not there to be read.",
        )
    fields.check_all_read(IGNORED_PART_FIELDS, ("type", "text", "summary", "thinking"), f"`{name}`", where)
    return text
