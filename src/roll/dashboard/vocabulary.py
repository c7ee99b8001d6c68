"""The texts of token ids, by the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.dashboard.files import Inside, Stamp
from roll.errors import RunDirectoryError

__all__ = ["Vocabulary", "find_tokenizer", "load_vocabulary"]

_LARGEST = 128 * 2**20
TOKENIZER = "tokenizer.json"


class Vocabulary:
    """Turns ids into texts.

    Args:
        tokenizer: of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """What people read; without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Of each token; special ones by their names, and parts of a character as their bytes are shown."""
        known: dict[int, str] = {}
        for token_id in ids:
            if token_id not in known:
                known[token_id] = self._one(token_id)
        return [known[token_id] for token_id in ids]

    def _one(self, token_id: int) -> str:
        name = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**31 else None
        if name is None:
            return f"⟨{token_id}⟩"
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text or not text:
            return name
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


def find_tokenizer(inside: Inside) -> tuple[tuple[str, ...], Stamp] | None:
    """Where the run keeps its tokenizer: beside its configuration, or in its newest checkpoint."""
    checkpoints = sorted(inside.stamps("checkpoints"), key=lambda name: (len(name), name), reverse=True)
    for parts in ((TOKENIZER,), *(("checkpoints", name, "model", TOKENIZER) for name in checkpoints)):
        stamp = inside.stamp(*parts)
        if stamp is not None:
            return parts, stamp
    return None


def load_vocabulary(inside: Inside, parts: Sequence[str]) -> Vocabulary:
    """Read a tokenizer.

    Raises:
        RunDirectoryError: it cannot be read.
    """
    from tokenizers import Tokenizer

    content = inside.read(*parts, limit=_LARGEST)
    try:
        return Vocabulary(Tokenizer.from_str(content.decode("utf-8")))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise RunDirectoryError(f"'{'/'.join(parts)}' is no tokenizer: {str(error)[:200]}") from None
