"""Where media stand in token sequences, and what tells such sequences apart: tokens together with digests.

tokens   [ Look :  <pad> <pad> <pad>  What ? ]
media               └─ digest 00ff… ─┘
key      [ Look :   -7…   -6…   -5…   What ? ]        another picture has other numbers; a text's key is its tokens
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
    """The placeholder tokens of a picture, a sound or a film in a sequence of tokens."""

    kind: MediaKind
    digest: str
    """Of its content, as in `MediaPart`."""
    start: int
    end: int
    """Its tokens are `token_ids[start:end]` of the sequence."""
    grid: tuple[int, int, int] | None = None
    """As in `MediaPart`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the span as JSON has it."""
        grid = None if self.grid is None else list(self.grid)
        return {"kind": self.kind, "digest": self.digest, "start": self.start, "end": self.end, "grid": grid}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MediaSpan:
        """Return the span that `to_dict` wrote."""
        values: dict[str, Any] = {**fields, "grid": None if fields["grid"] is None else tuple(fields["grid"])}
        return cls(**values)


SequenceMedia: TypeAlias = Sequence[Sequence[MediaSpan]]
"""Where media stand in each of several sequences; empty where none has any."""


def check_spans(media: Sequence[MediaSpan], num_tokens: int, what: str) -> None:
    """Check that spans lie in their sequence, in order and apart.

    Args:
        media: the spans.
        num_tokens: of the sequence.
        what: what has the sequence, for messages.

    Raises:
        DataError: they do not.
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
    """Return [L] integers that are equal as far as tokens and the contents of media are.

    Without media these are the tokens themselves. In place of a medium's placeholders stand negative numbers, which
    are no tokens: 62 bits of its kind, digest, grid and length, counted on from token to token.

    Args:
        token_ids: [L]
        media: where media stand in them.
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
    """Return the spans in a part of a sequence, counted from where the part stands.

    Args:
        media: of the whole sequence.
        start: first token of the part.
        stop: the one after its last.
        at: where the part's first token stands.

    Raises:
        DataError: a border of the part goes through a span: media are whole or not there.
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
