"""Convert message parts of any vendor to text: a text-only model gets a sentence for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Tag

from roll.agents.notes import Notes
from roll.agents.wire import Body

__all__ = ["Content", "Foreign", "Part", "TextPart", "text_of", "type_of"]

_SILENT = ("thinking", "redacted_thinking", "reasoning")
"""Kinds of parts with an answer's reasoning: the context already has it, in the model's own tokens."""
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "audio": "recording",
    "input_audio": "recording",
    "audio_url": "recording",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}


def type_of(value: Any, default: str = "") -> str:
    """Return the `type` of a tagged object: `default` if it has none, empty if it is not a text."""
    found = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return default if found is None else found if isinstance(found, str) else ""


class Foreign(Body):
    """An object of an unknown type; its fields are kept and not checked."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields but `type`."""
        return self.model_extra or {}


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text", "input_text", "output_text", "summary_text", "refusal"] = "text"
    text: str = ""
    refusal: str = ""


_TEXTS = ("text", "input_text", "output_text", "summary_text", "refusal")


def _kind(value: Any) -> str:
    return "Text" if type_of(value, "text") in _TEXTS else "Foreign"


Part = Annotated[Annotated[TextPart, Tag("Text")] | Annotated[Foreign, Tag("Foreign")], Discriminator(_kind)]
Content = str | list[Part] | None


def text_of(
    content: str | Sequence[TextPart | Foreign] | None, notes: Notes, tools: Mapping[str, str] | None = None
) -> str:
    """Return the text of a message or of a tool's result, one line for every part.

    Args:
        content: The content, in any vendor's form.
        notes: Receives notes on parts that cannot be shown.
        tools: Definitions of tools by their names, for parts that refer to a tool.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = (_text(part, notes, tools or {}) for part in content)
    return "\n".join(text for text in texts if text is not None)


def _text(part: TextPart | Foreign, notes: Notes, tools: Mapping[str, str]) -> str | None:
    if isinstance(part, TextPart):
        return part.text or part.refusal
    fields, kind = part.fields, part.type[:64]
    if kind in _SILENT:
        return None
    source = fields.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return str(source.get("data", ""))
    if kind == "tool_reference":
        name = str(fields.get("tool_name") or fields.get("name") or "")[:256]
        return tools.get(name, name)
    if kind == "search_result" and isinstance(fields.get("content"), list):
        found = [each.get("text") for each in fields["content"] if isinstance(each, Mapping)]
        head = [fields.get("title"), source]
        return "\n".join(text for text in (*head, *found) if isinstance(text, str) and text)
    word = _MEDIA.get(kind)
    if word is None:
        notes.add(f"part {kind}", f"agents send parts of messages of the type '{kind}': they are left out.")
        return None
    told = f"[{word}: not shown, only text can be read here]"
    notes.add(
        f"media {word}",
        f"agents send parts of messages of the type '{kind}', which the policy cannot read: it is given the words "
        f"'{told}' in their place.",
    )
    return told
