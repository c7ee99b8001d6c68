"""Chat messages: a text, or a sequence of parts that may be images, audio or video.

    Message ── to_dict ──► chat templates, JSON          only there is a message a dictionary
            ◄─ from_dict ── an environment's info

A media part has the digest of its content, never the content: comparing messages compares digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from roll.errors import UnsupportedError, short

__all__ = [
    "MEDIA_KINDS",
    "AudioPart",
    "Content",
    "ImagePart",
    "MediaKind",
    "MediaPart",
    "Message",
    "Part",
    "Speaker",
    "TextPart",
    "VideoPart",
    "content_key",
    "content_of",
    "described",
    "joined_content",
    "media_in",
    "text_of",
    "texts_of",
    "with_texts",
]

MediaKind: TypeAlias = Literal["image", "audio", "video"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
Speaker: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """A text between parts of other kinds.

    Raises:
        ValueError: The text is not a `str`.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"the text of a text part must be a str, got {short(self.text)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a dictionary for chat templates."""
        return {"type": "text", "text": self.text}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """An image, an audio clip or a video, identified by its digest; each kind has its own class.

    Raises:
        ValueError: The digest is not hexadecimal, or digest, source or grid has another type.
    """

    kind: ClassVar[MediaKind]
    digest: str
    """Digest of the content, in lower-case hexadecimal: equal digests mean equal contents."""
    source: str = field(default="", compare=False)
    """Where the content was read, for error messages; it does not count in comparisons."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of patches into which the model's processor splits it; `None`: not known yet."""

    def __post_init__(self) -> None:
        digest, grid = self.digest, self.grid
        if not isinstance(digest, str) or not 0 < len(digest) <= _LONGEST_DIGEST or not set(digest) <= _HEXADECIMAL:
            raise ValueError(
                f"the digest of an {self.kind} part must be lower-case hexadecimal, such as that of SHA-256, got "
                f"{short(digest)}"
            )
        if not isinstance(self.source, str):
            raise ValueError(f"the source of an {self.kind} part must be a str, got {short(self.source)}")
        if grid is not None and not (
            isinstance(grid, tuple) and len(grid) == 3 and all(type(size) is int and 0 < size < 2**31 for size in grid)
        ):
            raise ValueError(
                f"the grid of an {self.kind} part must be whole numbers of frames, rows and columns, got {short(grid)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a dictionary for chat templates, with its digest."""
        grid = None if self.grid is None else list(self.grid)
        fields = {"type": self.kind, "digest": self.digest, "source": self.source or None, "grid": grid}
        return {name: value for name, value in fields.items() if value is not None}


_HEXADECIMAL = frozenset("0123456789abcdef")
_LONGEST_DIGEST = 128
"""Characters, as SHA-512 has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePart(MediaPart):
    """An image."""

    kind: ClassVar[MediaKind] = "image"


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
"""Content of a message, an observation or a tool result: a text, or parts if some of it is not text."""
_PARTS: Mapping[str, type[ImagePart | AudioPart | VideoPart]] = {
    "image": ImagePart,
    "audio": AudioPart,
    "video": VideoPart,
}


def content_of(value: Any) -> Content:
    """Build a content from JSON: a text, or a list of parts as `to_dict` returns them.

    Parts that are all texts become one text, so that a content without media is always a `str`.

    Raises:
        ValueError: The value is neither a text nor a list of parts.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"a content must be text or a list of parts, got {type(value).__name__}")
    parts = tuple(part if isinstance(part, Part) else _part(part) for part in value)
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return parts


def _part(value: Any) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError(f"a part of a content must be an object with a type, got {type(value).__name__}")
    match value:
        case {"type": "text", "text": str(text)}:
            return TextPart(text=text)
        case {"type": str(kind), "digest": str(digest), **rest} if kind in _PARTS:
            return _media_part(kind, digest, **rest)
    raise ValueError(
        f"a part of a content must be a text, or one of {', '.join(_PARTS)} with a digest, got type "
        f"{short(value.get('type'))}"
    )


def _media_part(kind: str, digest: str, *, source: Any = "", grid: Any = None, **_: Any) -> Part:
    grid = tuple(grid) if isinstance(grid, list) else grid
    return _PARTS[kind](digest=digest, source="" if source is None else source, grid=grid)


def text_of(content: Content) -> str:
    """Return the text of a content, for code that supports only text.

    Raises:
        UnsupportedError: A part is not text, and would be lost.
    """
    if isinstance(content, str):
        return content
    for part in media_in(content):
        where = f" (from {part.source})" if part.source else ""
        raise UnsupportedError(
            f"a message has a part of kind '{part.kind}'{where}, which is not supported here: only text is."
        )
    return "".join(part.text for part in content if isinstance(part, TextPart))


def texts_of(content: Content) -> Iterator[str]:
    """Yield every text of a content."""
    if isinstance(content, str):
        yield content
    else:
        yield from (part.text for part in content if isinstance(part, TextPart))


def with_texts(content: Content, change: Callable[[str], str]) -> Content:
    """Return a content with `change` applied to each of its texts, and its media unchanged."""
    if isinstance(content, str):
        return change(content)
    return tuple(TextPart(text=change(part.text)) if isinstance(part, TextPart) else part for part in content)


def joined_content(contents: Sequence[Content], between: str = "\n\n") -> Content:
    """Join contents into one, with a text between each two."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return between.join(texts)
    parts: list[Part] = []
    for place, content in enumerate(contents):
        if place:
            parts.append(TextPart(text=between))
        parts += (TextPart(text=content),) if isinstance(content, str) else content
    return tuple(parts)


def media_in(content: Content) -> tuple[ImagePart | AudioPart | VideoPart, ...]:
    """Return the parts that are not text, in order."""
    return () if isinstance(content, str) else tuple(part for part in content if not isinstance(part, TextPart))


def described(content: Content) -> str:
    """Return a human-readable text of a content, with a note for each medium.

    >>> described((TextPart(text="Look: "), ImagePart(digest="00ff" * 16)))
    'Look: [image 00ff00ff00ff]'
    """
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else f"[{part.kind} {part.digest[:12]}]" for part in content)


def content_key(content: Content) -> str:
    """Return a text that identifies a content; for a content that is text, the text itself.

    Media are represented by kind and digest between NUL characters, which do not occur in texts of data sets.
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
    """Reasoning before an assistant's message. Templates have several names for it, which the renderer handles."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Tool calls of an assistant: `{"id": …, "type": "function", "function": {"name": …, "arguments": {…}}}` each."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""
    name: str | None = None
    """Name of the tool in a tool's message; in other messages, name of the speaker."""

    @property
    def text(self) -> str:
        """Text of the content, for code that supports only text; see `text_of`."""
        return self.content if isinstance(self.content, str) else text_of(self.content)

    @property
    def media(self) -> tuple[ImagePart | AudioPart | VideoPart, ...]:
        """Parts of the content that are not text, in order."""
        return media_in(self.content)

    @property
    def is_plain(self) -> bool:
        """Whether the message has only a role and a content."""
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
            ValueError: The content is neither text nor parts.
        """
        return _message(**fields)


def _message(
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
        content=content_of(content),
        reasoning=reasoning_content,
        tool_calls=tuple(tool_calls or ()),
        tool_call_id=tool_call_id,
        name=name,
    )
