"""Media spans in token sequences, and keys that identify a sequence by its tokens and the digests of its media.

tokens   [ Look :  <pad> <pad> <pad>  What ? ]
media               └─ digest 00ff… ─┘
key      [ Look :   -7…   -6…   -5…   What ? ]        distinct per image; a text token is its own key
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError
from roll.types.arrays import IntArray
from roll.types.messages import MediaKind

__all__ = [
    "EncodedText",
    "MediaSpan",
    "SequenceMedia",
    "build_sequence_key",
    "check_spans",
    "join_encoded",
    "shift_media",
    "slice_media",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSpan:
    """The placeholder tokens of an image, an audio clip or a video in a sequence of tokens."""

    kind: MediaKind
    digest: str
    """Digest of the content, as in `MediaPart`."""
    start: int
    end: int
    """The span's tokens are `token_ids[start:end]` of the sequence."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of patches, as in `MediaPart`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the span as a JSON object."""
        grid = None if self.grid is None else list(self.grid)
        return {"kind": self.kind, "digest": self.digest, "start": self.start, "end": self.end, "grid": grid}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MediaSpan:
        """Build the span from the object that `to_dict` returned."""
        values: dict[str, Any] = {**fields, "grid": None if fields["grid"] is None else tuple(fields["grid"])}
        return cls(**values)


SequenceMedia: TypeAlias = Sequence[Sequence[MediaSpan]]
"""Media spans of several sequences, one entry per sequence; empty if none has media."""


def check_spans(media: Sequence[MediaSpan], num_tokens: int, label: str) -> None:
    """Check that the media spans of a sequence lie within it, in order and without overlap.

    Args:
        media: The spans.
        num_tokens: Length of the sequence.
        label: Name of the sequence's owner, for messages.

    Raises:
        DataError: A span lies outside the sequence, or spans are out of order or overlap.
    """
    end = 0
    for span in media:
        if not end <= span.start < span.end <= num_tokens:
            raise DataError(
                f"{label} has {num_tokens} tokens, but its '{span.kind}' span is [{span.start}, {span.end}), and the "
                f"previous span ends at {end}: spans must be in order, must not overlap, and must lie in the sequence."
            )
        end = span.end


def build_sequence_key(token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan] = ()) -> NDArray[Any]:
    """Build the key of a sequence: integers [L] that are equal if and only if tokens and media content are equal.

    The key of a text token is the token ID. The keys of a media placeholder are negative numbers, which cannot be token
    IDs: 62 bits of a hash of kind, digest, grid and length, incremented from token to token.

    Args:
        token_ids: Tokens, shape [L].
        media: Media spans in the tokens.
    """
    if not media:
        return token_ids
    key = np.asarray(token_ids, np.int64).copy()
    for span in media:
        length = span.end - span.start
        content = f"{span.kind} {span.digest} {span.grid} {length}".encode()
        # Negative, so that no key equals a token id. 62 bits, so that `-1 - (first + length)` fits into int64.
        first = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 2
        key[span.start : span.end] = -1 - ((first + np.arange(length, dtype=np.int64)) % (1 << 62))
    return key


def shift_media(media: Iterable[MediaSpan], offset: int) -> tuple[MediaSpan, ...]:
    """Shift the positions of media spans by `offset` tokens."""
    return tuple(replace(span, start=span.start + offset, end=span.end + offset) for span in media)


def slice_media(media: Iterable[MediaSpan], start: int, stop: int, offset: int = 0) -> tuple[MediaSpan, ...]:
    """Return the spans in a slice of a sequence, with positions relative to the slice.

    Args:
        media: Spans of the whole sequence.
        start: First token of the slice.
        stop: End of the slice, exclusive.
        offset: Position of the slice's first token in the result.

    Raises:
        DataError: The slice contains only a part of a span.
    """
    found: list[MediaSpan] = []
    for span in media:
        if span.end <= start or span.start >= stop:
            continue
        if span.start < start or span.end > stop:
            raise DataError(
                f"the slice [{start}, {stop}) of a sequence contains only a part of its '{span.kind}' span "
                f"[{span.start}, {span.end}): keep or drop the whole span."
            )
        found.append(replace(span, start=span.start - start + offset, end=span.end - start + offset))
    return tuple(found)


class EncodedText(NamedTuple):
    """The token IDs of a text, and the spans of the text's images."""

    token_ids: IntArray
    """Token IDs [N], with one placeholder token per image patch."""
    media: tuple[MediaSpan, ...] = ()


def join_encoded(first: EncodedText, second: EncodedText) -> EncodedText:
    """Concatenate the token IDs and the image spans of two texts."""
    ids = np.concatenate([first.token_ids, second.token_ids]).astype(np.int32, copy=False)
    return EncodedText(ids, (*first.media, *shift_media(second.media, len(first.token_ids))))
