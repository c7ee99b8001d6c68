"""Chat messages, whose content is a string, or a sequence of text, image, audio and video parts.

    Message ── to_dict ──► chat templates, JSON          messages are dictionaries only in these
            ◄─ from_dict ── an environment's info

A media part contains the digest of its content, so comparing messages compares digests. Only `ImageData` also contains
the content, until an environment's image is in the run's media store.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from roll.errors import UnsupportedError, shorten

__all__ = [
    "MEDIA_KINDS",
    "AudioPart",
    "Content",
    "ImageData",
    "ImagePart",
    "MediaKind",
    "MediaPart",
    "Message",
    "Part",
    "Speaker",
    "TextPart",
    "VideoPart",
    "count_characters",
    "describe_content",
    "fill_placeholder",
    "get_content_key",
    "get_text",
    "iter_texts",
    "join_content",
    "list_media",
    "map_text",
    "parse_content",
]

MediaKind: TypeAlias = Literal["image", "audio", "video"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
Speaker: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """Text in a message that also contains media.

    Raises:
        ValueError: The text is not a `str`.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"the text of a text part must be a str, got {shorten(self.text)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a dictionary for chat templates."""
        return {"type": "text", "text": self.text}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """An image, an audio clip or a video, identified by its digest; there is one subclass per media type.

    Raises:
        ValueError: The digest is not hexadecimal, or digest, source or grid has the wrong type.
    """

    kind: ClassVar[MediaKind]
    digest: str
    """Digest of the content, in lower-case hexadecimal: equal digests mean equal content."""
    source: str = field(default="", compare=False)
    """Path or URL of the content, for error messages; ignored in comparisons."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of patches into which the model's processor splits the content; `None` until the
    processor has run."""

    def __post_init__(self) -> None:
        digest, grid = self.digest, self.grid
        if not isinstance(digest, str) or not 0 < len(digest) <= _MAX_DIGEST_LENGTH or not set(digest) <= _HEXADECIMAL:
            raise ValueError(
                f"the digest of a part of type '{self.kind}' must be lowercase hexadecimal, such as SHA-256, got "
                f"{shorten(digest)}"
            )
        if not isinstance(self.source, str):
            raise ValueError(f"the source of a part of type '{self.kind}' must be a str, got {shorten(self.source)}")
        if grid is not None and not (
            isinstance(grid, tuple) and len(grid) == 3 and all(type(size) is int and 0 < size < 2**31 for size in grid)
        ):
            raise ValueError(
                f"the grid of a part of type '{self.kind}' must be 3 positive integers (frames, rows, columns), got "
                f"{shorten(grid)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a dictionary for chat templates, with its digest."""
        grid = None if self.grid is None else list(self.grid)
        fields = {"type": self.kind, "digest": self.digest, "source": self.source or None, "grid": grid}
        return {name: value for name, value in fields.items() if value is not None}


_HEXADECIMAL = frozenset("0123456789abcdef")
_MAX_DIGEST_LENGTH = 128
"""Maximum number of characters of a digest; SHA-512 has this many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePart(MediaPart):
    """An image."""

    kind: ClassVar[MediaKind] = "image"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageData(ImagePart):
    """An image with its encoded content, before it is written to the run's media store. Only environments create it."""

    data: bytes = field(repr=False, compare=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> ImageData:
        """Build the part from an encoded image; the digest is computed from the encoded bytes, not from the pixels."""
        return cls(digest=hashlib.sha256(data).hexdigest(), data=data)

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a dictionary for JSON, with its content as base64."""
        return {"type": self.kind, "data": base64.b64encode(self.data).decode()}


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioPart(MediaPart):
    """An audio clip."""

    kind: ClassVar[MediaKind] = "audio"


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoPart(MediaPart):
    """A video."""

    kind: ClassVar[MediaKind] = "video"


Part: TypeAlias = TextPart | ImagePart | AudioPart | VideoPart
Content: TypeAlias = str | tuple[Part, ...]
"""Content of a message, an observation or a tool result: a string, or parts if some of it is not text."""
_PARTS: Mapping[str, type[ImagePart | AudioPart | VideoPart]] = {
    "image": ImagePart,
    "audio": AudioPart,
    "video": VideoPart,
}


def parse_content(value: Any) -> Content:
    """Build message content from JSON: a string, or a list of parts in the format of `to_dict`.

    If all parts are text, they are joined into one string, so content without media is always a `str`.

    Raises:
        ValueError: The value is neither a string nor a list of parts.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"content must be a string or a list of parts, got {type(value).__name__}")
    parts = tuple(part if isinstance(part, Part) else _parse_part(part) for part in value)
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return parts


def _parse_part(value: Any) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError(f"a part of message content must be an object with a type, got {type(value).__name__}")
    match value:
        case {"type": "text", "text": str(text)}:
            return TextPart(text=text)
        case {"type": "image", "data": str(data)}:
            return ImageData.from_bytes(_decode_base64(data))
        case {"type": str(kind), "digest": str(digest), **rest} if kind in _PARTS:
            return _build_media_part(kind, digest, **rest)
    raise ValueError(
        f"a part of message content must be a string, an image with data, or one of {', '.join(_PARTS)} with a digest, "
        f"got type "
        f"{shorten(value.get('type'))}"
    )


def _decode_base64(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data of an image must be base64: {error}") from error


def _build_media_part(kind: str, digest: str, *, source: Any = "", grid: Any = None, **_: Any) -> Part:
    grid = tuple(grid) if isinstance(grid, list) else grid
    return _PARTS[kind](digest=digest, source="" if source is None else source, grid=grid)


def get_text(content: Content) -> str:
    """Return the text of message content, for code that supports only text.

    Raises:
        UnsupportedError: A part is not text.
    """
    if isinstance(content, str):
        return content
    for part in list_media(content):
        location = f" (from {part.source})" if part.source else ""
        raise UnsupportedError(f"a message has a part of type '{part.kind}'{location}, but only text is supported.")
    return "".join(part.text for part in content if isinstance(part, TextPart))


def iter_texts(content: Content) -> Iterator[str]:
    """Yield the text of message content: the string, or the text of each text part."""
    if isinstance(content, str):
        yield content
    else:
        yield from (part.text for part in content if isinstance(part, TextPart))


def map_text(content: Content, function: Callable[[str], str]) -> Content:
    """Apply a function to the text of content, or to each of its text parts; media parts are unchanged."""
    if isinstance(content, str):
        return function(content)
    return tuple(TextPart(text=function(part.text)) if isinstance(part, TextPart) else part for part in content)


def count_characters(content: Content) -> int:
    """Return the number of characters of the content's text."""
    return sum(map(len, iter_texts(content)))


def fill_placeholder(template: str, placeholder: str, content: Content) -> Content:
    """Replace each occurrence of a placeholder in a template by message content."""
    if isinstance(content, str):
        return template.replace(placeholder, content)
    pieces: list[Part] = []
    for number, text in enumerate(template.split(placeholder)):
        pieces += content if number else ()
        pieces += (TextPart(text=text),) if text else ()
    return tuple(pieces)


def join_content(contents: Sequence[Content], separator: str = "\n\n") -> Content:
    """Join the contents of several messages, with a separator between them."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return separator.join(texts)
    parts: list[Part] = []
    for place, content in enumerate(contents):
        if place:
            parts.append(TextPart(text=separator))
        parts += (TextPart(text=content),) if isinstance(content, str) else content
    return tuple(parts)


def list_media(content: Content) -> tuple[ImagePart | AudioPart | VideoPart, ...]:
    """Return the image, audio and video parts of message content, in order."""
    return () if isinstance(content, str) else tuple(part for part in content if not isinstance(part, TextPart))


def describe_content(content: Content) -> str:
    """Return the content as readable text, with a placeholder for each image, audio clip or video.

    >>> describe_content((TextPart(text="Look: "), ImagePart(digest="00ff" * 16)))
    'Look: [image 00ff00ff00ff]'
    """
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else f"[{part.kind} {part.digest[:12]}]" for part in content)


def get_content_key(content: Content) -> str:
    """Return a string that identifies the content; for plain text, the text itself.

    Media are represented by kind and digest between NUL characters, which do not occur in dataset text.
    """
    if isinstance(content, str):
        return content
    return "".join(
        part.text if isinstance(part, TextPart) else f"\x00{part.kind}\x00{part.digest}\x00{part.grid or ''}\x00"
        for part in content
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat message."""

    role: Speaker
    content: Content
    reasoning: str | None = None
    """Reasoning before an assistant's message. The renderer maps it to the name that the chat template uses."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Tool calls of an assistant: `{"id": …, "type": "function", "function": {"name": …, "arguments": {…}}}` each."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""
    name: str | None = None
    """Name of the tool in a tool's message; in other messages, name of the speaker."""

    @property
    def text(self) -> str:
        """Text of the content, for code that supports only text; see `get_text`."""
        return self.content if isinstance(self.content, str) else get_text(self.content)

    @property
    def media(self) -> tuple[ImagePart | AudioPart | VideoPart, ...]:
        """Parts of the content that are not text, in order."""
        return list_media(self.content)

    @property
    def is_plain(self) -> bool:
        """True if the message has only a role and content."""
        return not (self.tool_calls or self.reasoning is not None or self.tool_call_id or self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the message as a dictionary for chat templates and JSON, without absent fields."""
        content = self.content if isinstance(self.content, str) else [part.to_dict() for part in self.content]
        fields = {
            "role": self.role,
            "content": content,
            "reasoning_content": self.reasoning,
            "tool_calls": list(self.tool_calls) or None,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Message:
        """Build the message from the dictionary that `to_dict` returned; other keys are ignored.

        Raises:
            ValueError: The content is neither a string nor a list of parts.
        """
        return _parse_message(**fields)


def _parse_message(
    role: Speaker,
    content: Any,
    reasoning_content: str | None = None,
    tool_calls: Sequence[Mapping[str, Any]] | None = None,
    tool_call_id: str | None = None,
    name: str | None = None,
    **_: Any,
) -> Message:
    return Message(
        role=role,
        content=parse_content(content),
        reasoning=reasoning_content,
        tool_calls=tuple(tool_calls or ()),
        tool_call_id=tool_call_id,
        name=name,
    )
