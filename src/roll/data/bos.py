"""Handling of the BOS token, which some tokenizers prepend to every text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BosDeduplicator"]


class BosDeduplicator:
    """Removes the duplicate BOS token if a tokenizer adds BOS to a text that already starts with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def remove_duplicate(self, text: str, ids: Sequence[int]) -> list[int]:
        """Remove the second of two BOS tokens at the start of a text's token IDs.

        Args:
            text: The text.
            ids: The text's token IDs, with the special tokens that the tokenizer adds.
        """
        bos, name = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        doubled = self._adds_bos and list(ids[:2]) == [bos, bos] and text.lstrip().startswith(str(name))
        return list(ids[1:] if doubled else ids)

    @cached_property
    def _adds_bos(self) -> bool:
        # Determined by tokenizing a text, because not every tokenizer has `add_bos_token` or respects it.
        bos = self._tokenizer.bos_token_id
        return bos is not None and list(self._tokenizer("a")["input_ids"][:1]) == [bos]
