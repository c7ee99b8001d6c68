"""Decodes tokens to text: with all special tokens, without them, or only the part after the reasoning."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.reasoning import ReasoningFormat, detect_reasoning_format, extract_answer, find_reasoning_start
from roll.data.turns import SpecialTokens
from roll.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NUM_CONTEXT_TOKENS", "Decoder", "get_rust_backend"]

NUM_CONTEXT_TOKENS = 24
"""Number of tokens before an answer that are searched for the start of its reasoning."""
_CALL_MARK_PATTERN = re.compile(r"tool|call|python_tag|constrain|ARGS|\|\"\|", re.IGNORECASE)
_CALL_ENDS = ("<|call|>", "<|tool_response>")
"""Tokens with which models end a message that calls tools."""


class Decoder:
    """Decodes the tokens of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens, template: str) -> None:
        """Build the decoder.

        Args:
            tokenizer: The model's tokenizer.
            special: The model's special tokens.
            template: The model's chat template; empty if it has none.
        """
        self._tokenizer, self._special, self._template = tokenizer, special, template
        self._backend = get_rust_backend(tokenizer)

    def decode_raw(self, token_ids: IntArray) -> str:
        """Decode token IDs with all special tokens, as the model wrote them."""
        return self._decode(token_ids, skip_special=False)

    def decode(self, token_ids: IntArray) -> str:
        """Decode token IDs without special tokens, except those that mark reasoning and tool calls.

        The token that ends a message is always removed.
        """
        if not self._marks:
            return self._decode(token_ids, skip_special=True)
        # The tokenizer can only skip all special tokens or none, so the unwanted ones are removed first.
        ids = token_ids[~np.isin(token_ids, self._unmarked_ids)]
        while len(ids) and int(ids[-1]) in self._end_ids:
            ids = ids[:-1]
        return self._decode(ids, skip_special=False)

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        """Decode the part of an answer after the model's reasoning, as in `decode`; empty if the reasoning never ends.

        Args:
            token_ids: The answer's token IDs, shape [T].
            context: The token IDs before the answer, shape [C]: some templates begin the reasoning in the generation
                prompt.
        """
        begun = bool(find_reasoning_start(self.decode_raw(context[-NUM_CONTEXT_TOKENS:]), self.reasoning))
        return extract_answer(self.decode(token_ids), self.reasoning, begun=begun) or ""

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the model's reasoning, detected from its template or tokenizer; `None` if it is unknown."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return detect_reasoning_format(self._template, {str(token) for token in added})

    @cached_property
    def _marks(self) -> dict[int, str]:
        """Special tokens that mark reasoning and tool calls, by ID."""
        shown = "".join(self.reasoning.all_marks) if self.reasoning else ""
        return {i: name for i, name in self._special.by_id.items() if name in shown or _CALL_MARK_PATTERN.search(name)}

    @cached_property
    def _unmarked_ids(self) -> IntArray:
        """IDs of the special tokens that do not mark reasoning or tool calls."""
        return np.array(sorted(self._special.by_id.keys() - self._marks.keys()), np.int32)

    @cached_property
    def _end_ids(self) -> set[int]:
        """IDs of the tokens that mark the end of reasoning or of a tool call and also end the message."""
        ends = self.reasoning.answer_ends if self.reasoning else ()
        return {i for i, name in self._marks.items() if name in ends or name in _CALL_ENDS}

    def _decode(self, token_ids: IntArray, *, skip_special: bool) -> str:
        ids = token_ids.tolist()
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        decoded = self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(decoded)


def get_rust_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the Rust backend of a tokenizer if it can be called directly with the same result; otherwise `None`."""
    from transformers import TokenizersBackend as Backend

    kind = type(tokenizer)
    if not isinstance(tokenizer, Backend) or kind._encode_plus is not Backend._encode_plus:
        return None
    if kind._decode is not Backend._decode:
        return None
    tokenizer("")  # the backend keeps truncation and padding of the last call; one without options turns them off
    return tokenizer.backend_tokenizer
