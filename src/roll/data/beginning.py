"""The token that some tokenizers put in front of every text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextBeginning"]


class TextBeginning:
    """Prevents a duplicate first token if a text already starts with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def once(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return a text's token IDs with the tokenizer's first token only once.

        Args:
            text: The text.
            ids: Its token IDs, with the tokenizer's own special tokens.
        """
        bos, name = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        doubled = self._adds_bos and list(ids[:2]) == [bos, bos] and text.lstrip().startswith(str(name))
        return list(ids[1:] if doubled else ids)

    @cached_property
    def _adds_bos(self) -> bool:
        bos = self._tokenizer.bos_token_id
        return bos is not None and list(self._tokenizer("a")["input_ids"][:1]) == [bos]
