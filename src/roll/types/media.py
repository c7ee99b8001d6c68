"""Media spans in token sequences, and keys that identify such sequences: tokens together with digests.

tokens   [ Look :  <pad> <pad> <pad>  What ? ]
media               └─ digest 00ff… ─┘
key      [ Look :   -7…   -6…   -5…   What ? ]        another image has other numbers; a text's key is its tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError
from roll.types.messages import MediaKind

__all__ = ["MediaSpan", "SequenceMedia", "check_spans", "sequence_key", "sliced_media"]


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
    """See `MediaPart`."""

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
"""Media spans of each of several sequences; empty if no sequence has media."""


def check_spans(media: Sequence[MediaSpan], num_tokens: int, what: str) -> None:
    """Check that spans lie in their sequence, in order and without overlap.

    Args:
        media: The spans.
        num_tokens: Length of the sequence.
        what: Owner of the sequence, for messages.

    Raises:
        DataError: A span lies outside the sequence, or spans are out of order or overlap.
    """
    end = 0
    for span in media:
        if not end <= span.start < span.end <= num_tokens:
            raise DataError(
                f"{what} has {num_tokens} tokens, and a part of kind '{span.kind}' at {span.start} to {span.end}, "
                f"behind {end}: spans must lie in the sequence, in order, without overlap."
            )
        end = span.end


def sequence_key(token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan] = ()) -> NDArray[Any]:
    """Return integers [L] that are equal exactly where tokens and the contents of media are equal.

    Without media these are the tokens themselves. Placeholders of media become negative numbers, which are not tokens:
    62 bits of a hash of kind, digest, grid and length, incremented from token to token.

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
        first = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 2
        key[span.start : span.end] = -1 - ((first + np.arange(length, dtype=np.int64)) % (1 << 62))
    return key


def sliced_media(media: Iterable[MediaSpan], start: int, stop: int, at: int = 0) -> tuple[MediaSpan, ...]:
    """Return the spans in a slice of a sequence, with positions relative to the slice.

    Args:
        media: Spans of the whole sequence.
        start: First token of the slice.
        stop: End of the slice, exclusive.
        at: Position of the slice's first token in the result.

    Raises:
        DataError: A border of the slice cuts a span: a medium must be whole or absent.
    """
    found: list[MediaSpan] = []
    for span in media:
        if span.end <= start or span.start >= stop:
            continue
        if span.start < start or span.end > stop:
            raise DataError(
                f"tokens {start} to {stop} of a sequence cut a part of kind '{span.kind}' at {span.start} to "
                f"{span.end}: leave it in or out as a whole."
            )
        found.append(replace(span, start=span.start - start + at, end=span.end - start + at))
    return tuple(found)
