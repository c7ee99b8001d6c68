"""Reads the media of rows: paths, bytes, base64, data URLs, arrays, Pillow images and frames become message parts.

    images: [a.png, b.png]      messages: Compare <image> with <image>.
                                           text, image a, text, image b, text

The media in a row's columns replace `<image>`, `<audio>` and `<video>` in the row's messages, in order; media of a type
without such a placeholder precede the text of the first user message. Each medium is decoded and stored when its row is
read; a row with an unreadable medium is a bad row.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from roll.config.sources import FileTable
from roll.data.cells import BadRow, as_list
from roll.errors import DataError, InfraError, shorten
from roll.media import MediaStore, build_video, convert_array_to_audio, convert_array_to_image, convert_pillow_to_image
from roll.types import (
    MEDIA_KINDS,
    AudioPart,
    Content,
    ImagePart,
    MediaKind,
    Message,
    Part,
    TextPart,
    VideoPart,
    iter_texts,
    parse_content,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MEDIA_FIELDS",
    "MEDIA_NOUNS",
    "MEDIA_PLACEHOLDERS",
    "MediaReader",
    "build_media_reader",
    "describe_marks",
    "hint_at_missing_media",
    "place_media",
]

RowMedia: TypeAlias = ImagePart | AudioPart | VideoPart
MEDIA_PLACEHOLDERS: Mapping[MediaKind, str] = {kind: f"<{kind}>" for kind in MEDIA_KINDS}
"""Placeholders in a message's text for media of the row's columns, as in verl, LLaMA-Factory and ms-swift."""
MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("bytes", "image", "base64", "data", "path", "url", "image_url"),
    "audio": ("array", "bytes", "audio", "base64", "data", "path", "url", "audio_url", "input_audio"),
    "video": ("frames", "bytes", "video", "base64", "data", "path", "url", "video_url"),
}
"""Fields of an object that may contain its medium."""
MEDIA_NOUNS: Mapping[MediaKind, str] = {"image": "an image", "audio": "audio", "video": "a video"}
"""A noun for each type of medium, for messages."""
_PART_TYPES: Mapping[MediaKind, type[RowMedia]] = {"image": ImagePart, "audio": AudioPart, "video": VideoPart}
_PLURALS: Mapping[MediaKind, str] = {"image": "images", "audio": "audio files", "video": "videos"}
_NEXT_MEDIUM_MARK_PATTERN = re.compile("\ufdd0(image|audio|video)\ufdd1")
"""Mark of a message part that refers to the next medium of the row's column."""
_MAX_BASE64_CHARACTERS: Mapping[MediaKind, int] = {"image": 96 * 2**20, "audio": 384 * 2**20, "video": 384 * 2**20}
"""Maximum number of base64 characters of a medium: more than 4 / 3 of the limit on decoded bytes."""


class MediaReader:
    """Reads media into the run's store.

    Args:
        store: The run's media store.
        directory: The directory that relative paths refer to.
    """

    def __init__(self, store: MediaStore, directory: Path | None = None) -> None:
        self._store = store
        self._directory = directory or Path()
        self._known: dict[Any, str] = {}
        """Cached digests by kind, and by file, files of frames or encoded content. A row is read again whenever it is
        drawn, but its media are not: a file that is replaced or deleted during the run does not change the run's data.
        """

    def mark(self, value: Any, location: str, kind: MediaKind = "image") -> str:
        """Read and store one medium, and return a mark for its position in a text, which `place_media` replaces.

        Raises:
            BadRow: The medium cannot be read.
        """
        return f"\ufdd0{kind} {self.read(value, location, kind).digest}\ufdd1"

    def mark_next(self, kind: MediaKind) -> str:
        """Return a mark for the next medium of the row's column, at its position in a text."""
        return f"\ufdd0{kind}\ufdd1"

    def read(self, value: Any, location: str, kind: MediaKind = "image") -> RowMedia:
        """Read and store one medium.

        Args:
            value: A path, encoded bytes, base64 text, a data URL, or an object with one of them in a field of
                `MEDIA_FIELDS`. An image may also be an array or a Pillow image; audio an `array` with its
                `sampling_rate`; a video a list of `frames` with `fps`.
            location: The medium's location, for messages.
            kind: The type of medium.

        Raises:
            BadRow: The medium cannot be read, or the model does not read media of this type.
        """
        try:
            self._store.check_kind(kind, f"{location}: the {kind}")
            digest, source = self._store_value(value, location, kind)
        except BadRow:
            raise
        except DataError as error:
            raise BadRow(kind, f"{error} Correct the {kind}, or remove the row.") from error
        return _PART_TYPES[kind](digest=digest, source=source)

    def _store_value(self, value: Any, location: str, kind: MediaKind) -> tuple[str, str]:
        """Store a medium, and return its digest and its source."""
        label = f"{location}: the {kind}"
        value = as_list(value)
        if kind == "audio" and isinstance(value, Mapping) and value.get("array") is not None:
            return self._store.add_clip(convert_array_to_audio(value["array"], value.get("sampling_rate"), label)), ""
        if kind == "video" and (frames := _get_frames(value)) is not None:
            fps = value.get("fps") if isinstance(value, Mapping) else None
            return self._store_frames(frames, fps, location), ""
        if kind == "video" and isinstance(value, Mapping) and value.get("fps") is not None:
            raise DataError(f"{label} is a file with `fps`, but the frame rate of a file cannot be set: remove `fps`.")
        found = self._find_content(value, location, kind)
        if isinstance(found, Path):
            return self._store_file(found, location, kind), str(found)
        if isinstance(found, bytes):
            return self._store_bytes(found, label, kind), ""
        if kind == "image":
            return self._store.add_image(_to_image(found, location)), ""
        raise DataError(
            f"{label} must be a path, bytes, base64, or an object with "
            f"{'`array` and `sampling_rate`' if kind == 'audio' else '`frames` and `fps`'}, got {shorten(value)}."
        )

    def _store_frames(self, frames: Any, fps: Any, location: str) -> str:
        """Store a video that is given as frames."""
        label, key = f"{location}: the video", None
        if isinstance(frames, list) and all(isinstance(frame, str) for frame in frames):
            key = (
                "video",
                str(fps),
                hashlib.blake2b("\0".join(frames).encode("utf-8", "replace"), digest_size=20).digest(),
            )
            if key in self._known:
                return self._known[key]
        digest = self._store.add_clip(build_video(self._load_frames(frames, location), fps, label))
        if key is not None:
            self._known[key] = digest
        return digest

    def _load_frames(self, frames: Any, location: str) -> Any:
        """Return the frames of a video: an array, or images."""
        if isinstance(frames, np.ndarray) or (frames and isinstance(as_list(frames[0]), list)):
            return _as_bytes(frames)
        return [self._load_image(frame, f"{location}, frame {number}") for number, frame in enumerate(frames, 1)]

    def _load_image(self, value: Any, location: str) -> Image:
        found = self._find_content(value, location, "image")
        if isinstance(found, Path):
            found = self._read_file(found, location, "image")
        if not isinstance(found, bytes):
            return _to_image(found, location)
        return cast("Image", self._store.decode(found, f"{location}: the image"))

    def _find_content(self, value: Any, location: str, kind: MediaKind) -> Any:
        """Return the path or the bytes of a medium, or the value itself if it is neither."""
        if isinstance(value, Mapping):
            return self._find_content(_select_field(value, location, kind), location, kind)
        if isinstance(value, str):
            return self._parse_text(value, location, kind)
        return bytes(value) if isinstance(value, bytearray | memoryview) else value

    def _parse_text(self, value: str, location: str, kind: MediaKind) -> Path | bytes:
        """Parse a text to the path that it contains, or to the bytes that it encodes."""
        scheme, _, rest = value.partition(":")
        if scheme == "data" and "base64," in rest[:80]:
            return _decode_base64(rest.partition("base64,")[2], location, kind)
        if scheme.lower() in ("http", "https", "ftp", "s3", "gs", "hf"):
            raise DataError(
                f"{location}: the {kind} is the URL {shorten(value)}, and {_PLURALS[kind]} are not downloaded during a "
                "run: download them first, and use paths."
            )
        if scheme == "file":
            raise DataError(f"{location}: the {kind} is the URL {shorten(value)}: use a path without `file:`.")
        path = Path(value) if len(value) < 4096 and "\0" not in value else None
        if path is not None:
            found = self._directory / path
            if (kind, str(found)) in self._known or found.is_file():
                return found
        if (len(value) > 255 and path is None) or len(value) > 1024:
            return _decode_base64(value, location, kind)
        raise DataError(f"{location}: the {kind} {shorten(value)} is not a file in '{self._directory.absolute()}'.")

    def _store_file(self, path: Path, location: str, kind: MediaKind) -> str:
        key = kind, str(path)
        if key not in self._known:
            data = self._read_file(path, location, kind)
            self._known[key] = self._store.add(data, f"{location}: the {kind} '{path}'", kind)
        return self._known[key]

    def _read_file(self, path: Path, location: str, kind: MediaKind) -> bytes:
        try:
            self._store.check_size(path.stat().st_size, f"{location}: the {kind} '{path}'", kind)
            return path.read_bytes()
        except OSError as error:
            message = f"{location}: the {kind} '{path}' cannot be read: {error.strerror}."
            # Any other error, such as one of a network file system, says nothing about the row, which must not be
            # skipped because of it.
            is_bad_row = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
            raise (DataError if is_bad_row else InfraError)(message) from error

    def _store_bytes(self, data: bytes, label: str, kind: MediaKind) -> str:
        key = kind, hashlib.blake2b(data, digest_size=20).digest()
        if key not in self._known:
            self._known[key] = self._store.add(data, label, kind)
        return self._known[key]


def build_media_reader(config: object, store: MediaStore | None) -> MediaReader | None:
    """Build the reader of a source's media; relative paths refer to the directory of the source's file.

    Args:
        config: The source's entry in the configuration.
        store: The run's media store; `None` for a text-only model.
    """
    if store is None:
        return None
    return MediaReader(store, Path(config.path).parent if isinstance(config, FileTable) else None)


def place_media(
    messages: Sequence[Message], media: Sequence[RowMedia], location: str, columns: Collection[MediaKind] = ()
) -> tuple[Message, ...]:
    """Insert a row's media into its messages, at placeholders and at the marks of `MediaReader.mark`.

    Args:
        messages: The messages, with one placeholder for each medium of a type, or with none.
        media: The media of the row's columns, in order within each type.
        location: The row's location, for messages.
        columns: The types of media for which the row has a column, even if it is empty. If there are no media, a
            placeholder of any other type is treated as text.

    Raises:
        BadRow: The numbers of media and placeholders of a type differ, or there is no user message.
    """
    expected = {*columns, *(kind for one in messages for kind in _NEXT_MEDIUM_MARK_PATTERN.findall(str(one.content)))}
    messages = tuple(map(_replace_marks, messages))
    texts = [text for message in messages for text in iter_texts(message.content)]
    queues: dict[str, list[RowMedia]] = {}
    unplaced: list[RowMedia] = []
    for kind, placeholder in MEDIA_PLACEHOLDERS.items():
        own = [part for part in media if part.kind == kind]
        places = sum(text.count(placeholder) for text in texts) if own or kind in expected else 0
        if places not in (0, len(own)):
            nouns = _PLURALS[kind]
            raise BadRow(
                kind,
                f"{location}: the row has {len(own)} {nouns.removesuffix('s') if len(own) == 1 else nouns}, but its "
                f"messages have {places} placeholder{'' if places == 1 else 's'} {placeholder}: "
                + ("use one for each, or none." if own else f"add the {nouns}, or remove the placeholders."),
            )
        if places:
            queues[placeholder] = own
        else:
            unplaced += own
    if queues:
        messages = tuple(replace(message, content=_fill_placeholders(message.content, queues)) for message in messages)
    if not unplaced:
        return messages
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise BadRow(
            unplaced[0].kind, f"{location}: the row has {unplaced[0].kind}, but no user message that could contain it."
        )
    asked = messages[first]
    own_parts = (TextPart(text=asked.content),) if isinstance(asked.content, str) else asked.content
    return (*messages[:first], replace(asked, content=(*unplaced, *own_parts)), *messages[first + 1 :])


def hint_at_missing_media(token: str) -> str:
    """Return a remedy for a message that contains the media placeholder `token`; empty if `token` is not one.

    >>> hint_at_missing_media("<image>")
    ' If it stands for an image, the row has no column with images: set `images_key` to the name of the column.'
    """
    kind = next((kind for kind, placeholder in MEDIA_PLACEHOLDERS.items() if placeholder == token), None)
    if kind is None:
        return ""
    return (
        f" If it stands for {MEDIA_NOUNS[kind]}, the row has no column with {_PLURALS[kind]}: set `{kind}s_key` to the "
        "name of the column."
    )


def describe_marks(text: str) -> str:
    """Replace the marks of media in a text by readable placeholders, for messages."""
    return re.sub("\ufdd0([a-z]+(?: [0-9a-f]{12})?)[0-9a-f]*\ufdd1", r"[\1]", text)


def _replace_marks(message: Message) -> Message:
    """Replace each mark of a medium in a message by a media part."""
    if not isinstance(message.content, str) or "\ufdd0" not in message.content:
        return message
    text = _NEXT_MEDIUM_MARK_PATTERN.sub(lambda mark: f"<{mark[1]}>", message.content)
    pieces = re.split("\ufdd0((?:image|audio|video) [0-9a-f]+)\ufdd1", text)
    parts: list[Part] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            kind, _, digest = piece.partition(" ")
            parts += [part(digest=digest) for name, part in _PART_TYPES.items() if name == kind]
        elif piece:
            parts.append(TextPart(text=piece))
    return replace(message, content=tuple(parts))


def _fill_placeholders(content: Content, queues: Mapping[str, list[RowMedia]]) -> Content:
    """Replace each placeholder in the content's text with the next medium of its queue."""
    pattern = re.compile("(" + "|".join(map(re.escape, queues)) + ")")
    parts: list[Part] = []
    for part in (TextPart(text=content),) if isinstance(content, str) else content:
        if not isinstance(part, TextPart):
            parts.append(part)
            continue
        for piece in pattern.split(part.text):
            if piece in queues:
                parts.append(queues[piece].pop(0))
            elif piece:
                parts.append(TextPart(text=piece))
    return parse_content(parts)


def _get_frames(value: Any) -> Any:
    """Return the frames of a video, or `None` if it is a file."""
    if isinstance(value, Mapping):
        frames = as_list(value.get("frames") if value.get("frames") is not None else value.get("video"))
        return frames if isinstance(frames, list | tuple | np.ndarray) else None
    return value if isinstance(value, list | tuple | np.ndarray) else None


def _to_image(value: Any, location: str) -> Image:
    """Convert an array, a nested list or a Pillow image to an image."""
    if hasattr(value, "convert") and hasattr(value, "tobytes"):  # a Pillow image; its lazy file may be corrupted
        return convert_pillow_to_image(value, f"{location}: the image")
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value and isinstance(value[0], list)):
        return convert_array_to_image(_as_bytes(value), f"{location}: the image")
    raise DataError(f"{location}: an image must be a path, bytes, base64, or an array, got {shorten(value)}.")


def _as_bytes(value: Any) -> np.ndarray[Any, Any]:
    """Convert integers from 0 to 255 to uint8, because lists and some tables store wider integers."""
    array = np.asarray(value)
    fits = np.issubdtype(array.dtype, np.integer) and array.size and 0 <= array.min() <= array.max() <= 255
    return array.astype(np.uint8) if fits else array


def _select_field(value: Mapping[str, Any], location: str, kind: MediaKind) -> Any:
    """Return the value of the first field of an object that contains a medium."""
    for name in MEDIA_FIELDS[kind]:
        if value.get(name) is not None:
            return value[name]
    raise DataError(
        f"{location}: {MEDIA_NOUNS[kind]} must have bytes or a path, got an object with {', '.join(map(str, value))}."
    )


def _decode_base64(text: str, location: str, kind: MediaKind) -> bytes:
    if len(text) > _MAX_BASE64_CHARACTERS[kind]:
        raise DataError(
            f"{location}: the {kind} has {len(text):,} base64 characters, but at most "
            f"{_MAX_BASE64_CHARACTERS[kind]:,} are supported."
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{location}: the {kind} is not valid base64: {error}.") from error
