"""Decodes token IDs with the run's tokenizer."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from roll.errors import RunDirectoryError
from roll.tracking.reading.files import FileStamp, SafeDirectory

__all__ = ["Vocabularies", "Vocabulary"]

_MAX_FILE_BYTES = 128 * 2**20
_MAX_TOKENIZERS = 3
"""Maximum number of tokenizers in memory: each may take a hundred megabytes, and most runs share one."""
TOKENIZER_FILE = "tokenizer.json"


class Vocabulary:
    """Decodes token ids to text.

    Args:
        tokenizer: a tokenizer of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to readable text without special tokens."""
        return self._decode_ids(list(ids), skip_special_tokens=True)

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        """Decode each token separately: special tokens as their names, incomplete characters as bytes."""
        known: dict[int, str] = {}
        for token_id in ids:
            if token_id not in known:
                known[token_id] = self._decode_token(token_id)
        return [known[token_id] for token_id in ids]

    def _decode_ids(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        with _convert_panics("the tokenizer"):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _decode_token(self, token_id: int) -> str:
        name = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**31 else None
        if name is None:
            return f"⟨{token_id}⟩"
        text = self._decode_ids([token_id], skip_special_tokens=False)
        if "\ufffd" in text or not text:  # a part of a character: the name shows its bytes
            return name
        # SentencePiece writes a leading space as `▁`, which decoding a single token drops.
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


class Vocabularies:
    """Loads the vocabularies of runs, one per distinct tokenizer, and keeps the most recently used in memory."""

    def __init__(self) -> None:
        self._digests: dict[tuple[Path, tuple[str, ...], FileStamp], str] = {}
        self._loaded: OrderedDict[str, Vocabulary] = OrderedDict()
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    def find(self, run_dir: SafeDirectory) -> Vocabulary | None:
        """Return the vocabulary of the tokenizer in a directory; `None` if there is no readable tokenizer."""
        where = _find_tokenizer(run_dir)
        if where is None or where[1].size > _MAX_FILE_BYTES:
            return None
        key = (run_dir.root, *where)
        try:
            with self._lock:
                digest = self._digests.get(key)
                if digest not in self._loaded and digest not in self._broken:
                    content = run_dir.read(*where[0], limit=_MAX_FILE_BYTES)
                    digest = self._digests[key] = xxhash.xxh3_128_hexdigest(content)
                    self._load(digest, content, "/".join(where[0]))
                if digest in self._broken:
                    return None
                self._loaded.move_to_end(digest)
                while len(self._loaded) > _MAX_TOKENIZERS:
                    self._loaded.popitem(last=False)
                return self._loaded[digest]
        except RunDirectoryError:
            return None

    def _load(self, digest: str, content: bytes, name: str) -> None:
        """Load a tokenizer and store it under its digest, or record that it is malformed."""
        if digest in self._loaded or digest in self._broken:
            return
        try:
            self._loaded[digest] = _load_tokenizer(content, name)
        except RunDirectoryError:
            self._broken.add(digest)


def _find_tokenizer(run_dir: SafeDirectory) -> tuple[tuple[str, ...], FileStamp] | None:
    """Return the path and stamp of a run's tokenizer, in the run directory or in the newest checkpoint that has one."""
    checkpoints = sorted(run_dir.list_stamps("checkpoints"), key=lambda name: (len(name), name), reverse=True)
    for parts in ((TOKENIZER_FILE,), *(("checkpoints", name, "model", TOKENIZER_FILE) for name in checkpoints)):
        stamp = run_dir.get_stamp(*parts)
        if stamp is not None:
            return parts, stamp
    return None


def _load_tokenizer(content: bytes, name: str) -> Vocabulary:
    from tokenizers import Tokenizer

    with _convert_panics(f"'{name}'"):
        return Vocabulary(Tokenizer.from_str(content.decode("utf-8")))


@contextlib.contextmanager
def _convert_panics(message_start: str) -> Iterator[None]:
    """Convert errors of the tokenizer library within the `with` block to a `RunDirectoryError`.

    Untrusted files may cause panics in the library's Rust code, and a panic is not an `Exception`.

    Args:
        message_start: Start of the error message.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RunDirectoryError(f"{message_start} cannot be used: {str(error)[:200]}") from None
