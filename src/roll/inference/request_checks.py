"""Rejects requests that an engine in another process cannot compute."""

from __future__ import annotations

from roll.errors import DataError
from roll.types import GenerationRequest, IntArray

__all__ = ["check_length", "check_tokens"]


def check_tokens(label: str, token_ids: IntArray, vocab_size: int) -> None:
    """Reject a sequence that would end the engine's process.

    Raises:
        DataError: there are no tokens, or a token is outside the vocabulary.
    """
    if len(token_ids) == 0:
        raise DataError(f"{label} has no tokens: at least one is required.")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(
            f"{label} has token id {wrong}, which is out of range for the vocabulary size {vocab_size}: use the "
            "model's tokenizer."
        )


def check_length(request: GenerationRequest, max_context: int) -> None:
    """Reject a request that does not fit into the engine's context.

    Raises:
        DataError: prompt plus `max_new_tokens` exceeds the engine's context, or `max_new_tokens` is less than 1.
    """
    prompt, answer = len(request.token_ids), request.sampling.max_new_tokens
    if answer < 1:
        raise DataError(f"request {request.request_id}: max_new_tokens must be at least 1, got {answer}.")
    if prompt + answer > max_context:
        raise DataError(
            f"request {request.request_id}: {prompt} prompt tokens plus max_new_tokens {answer} exceed the engine's "
            f"context length {max_context}: shorten the prompt, lower rollout.max_new_tokens, or raise "
            "inference.max_context."
        )
