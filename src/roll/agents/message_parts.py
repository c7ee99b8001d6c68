"""Converts the message parts of all vendors to text and images.

If the policy reads only text, each image is replaced by a placeholder, as audio, video and files always are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Tag

from roll import types
from roll.agents.request_errors import RequestError
from roll.agents.warning_log import WarningLog
from roll.agents.wire import ApiObject
from roll.envs.image_storage import LIMITS
from roll.types import Content as MessageContent

__all__ = ["Content", "Part", "TextPart", "UnknownObject", "get_type", "read_content", "read_text"]

_REASONING_TYPES = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts that repeat an answer's reasoning; ignored, because the context already has the model's tokens."""
_MAX_BASE64 = LIMITS.num_bytes * 4 // 3 + 4
"""Maximum number of base64 characters of an image: decoding blocks the event loop, and thus the other agents."""
_MEDIA_NAMES = {
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


def get_type(value: Any, default: str = "") -> str:
    """Return the field `type` of an object, `default` if it is missing, or an empty string if it is not a string."""
    found = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return default if found is None else found if isinstance(found, str) else ""


class UnknownObject(ApiObject):
    """An object of an unknown type; its fields are kept, but not validated."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields except `type`."""
        return self.model_extra or {}


class TextPart(ApiObject):
    """A text part of a message."""

    type: Literal["text", "input_text", "output_text", "summary_text", "refusal"] = "text"
    text: str = ""
    refusal: str = ""


_TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "refusal")


def _get_part_type(value: Any) -> str:
    return "Text" if get_type(value, "text") in _TEXT_TYPES else "Unknown"


Part = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[UnknownObject, Tag("Unknown")], Discriminator(_get_part_type)
]
Content = str | list[Part] | None


def read_text(
    content: str | Sequence[TextPart | UnknownObject] | None,
    warnings: WarningLog,
    tools: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a message or of a tool result; its parts are joined with newlines.

    Args:
        content: The content, in any vendor's format.
        warnings: Logs a warning for each type of part that is not supported.
        tools: Definitions of tools by name, for parts that refer to a tool.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = (_read_part(part, warnings, tools or {}) for part in content)
    return "\n".join(text for text in texts if text is not None)


def read_content(
    content: str | Sequence[TextPart | UnknownObject] | None,
    warnings: WarningLog,
    tools: Mapping[str, str] | None = None,
) -> MessageContent:
    """Return the content of a message or of a tool result: a string, or a list of texts and images in order.

    Args:
        content: The content, in any vendor's format.
        warnings: Logs a warning for each type of part that is not supported; images are supported if
            `warnings.reads_images` is true.
        tools: Definitions of tools by name, for parts that refer to a tool.

    Raises:
        RequestError: An image is not valid base64, or is a URL (URLs are not downloaded).
    """
    images = content is not None and not isinstance(content, str) and warnings.reads_images
    if not images or not any(_is_image(part) for part in content or ()):
        return read_text(content, warnings, tools)
    parts: list[types.Part] = []
    for part in content or ():
        if isinstance(part, UnknownObject) and _is_image(part):
            parts.append(_read_image(part))
        elif isinstance(part, TextPart | UnknownObject) and (text := _read_part(part, warnings, tools or {})):
            before = parts[-1] if parts else None
            joined = f"{before.text}\n{text}" if isinstance(before, types.TextPart) else text
            parts[-1 if isinstance(before, types.TextPart) else len(parts) :] = [types.TextPart(text=joined)]
    return tuple(parts)


def _is_image(part: Any) -> bool:
    return isinstance(part, UnknownObject) and _MEDIA_NAMES.get(part.type) == "image"


def _read_image(part: UnknownObject) -> types.ImagePart:
    """Read the image of a message part.

    The part has OpenAI's `image_url`, Anthropic's `source`, or the digest of a prompt's image as in
    `AgentTask.messages`.
    """
    if part.type == "image" and isinstance(part.fields.get("digest"), str):
        try:
            return types.ImagePart(digest=part.fields["digest"])
        except ValueError as error:
            raise RequestError(400, "invalid_value", str(error), field="messages") from None
    found = part.fields.get("source") or part.fields.get("image_url") or part.fields.get("image")
    if isinstance(found, Mapping):
        found = found.get("data") or found.get("url")
    if not isinstance(found, str) or not found:
        raise RequestError(
            400, "invalid_value", f"a part of type '{part.type[:64]}' has no image data.", field="messages"
        )
    scheme, _, rest = found.partition(":")
    if scheme.lower() == "data":
        header, _, found = rest.partition(",")
        if not header.endswith(";base64"):
            raise RequestError(400, "invalid_value", "the data URL of an image must be base64.", field="messages")
    elif ":" in found[:16]:
        message = f"images are not downloaded: send a data URL instead of '{found[:64]}'."
        raise RequestError(400, "invalid_image_url", message, field="messages")
    if len(found) > _MAX_BASE64:
        message = f"an image has {len(found):,} base64 characters, but at most {_MAX_BASE64:,}"
        raise RequestError(400, "invalid_image", f"{message} are allowed: send a smaller image.", field="messages")
    try:
        return types.ImageData.from_bytes(base64.b64decode(found, validate=True))
    except (binascii.Error, ValueError) as error:
        message = f"an image is not valid base64: {error}."
        raise RequestError(400, "invalid_value", message, field="messages") from None


def _read_part(part: TextPart | UnknownObject, warnings: WarningLog, tools: Mapping[str, str]) -> str | None:
    if isinstance(part, TextPart):
        return part.text or part.refusal
    fields, kind = part.fields, part.type[:64]
    if kind in _REASONING_TYPES:
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
    word = _MEDIA_NAMES.get(kind)
    if word is None:
        warnings.warn_once(f"part {kind}", f"agents send message parts of the type '{kind}', which are ignored.")
        return None
    told = f"[{word} not shown: this model reads only text]"
    warnings.warn_once(
        f"media {word}",
        f"agents send message parts of the type '{kind}', which the policy does not support: the policy receives the "
        f"text '{told}' instead.",
    )
    return told
