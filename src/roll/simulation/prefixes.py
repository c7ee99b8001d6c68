"""The prefix cache of an engine: whole blocks of tokens, each identified by all tokens up to its end.

As in vLLM, a block is treated as cached as soon as the first request with this block arrives, because other requests
with the block are computed in the same step or later. Blocks are never evicted, so the savings are overestimated if an
engine's cache is too small.
"""

from __future__ import annotations

import hashlib

import numpy as np

from roll.types import IntArray

__all__ = ["PrefixCache"]


class PrefixCache:
    """The cached prompt blocks of an engine.

    Args:
        block_size: Tokens per block; 0 disables the cache.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[bytes] = set()

    def add_prompt(self, token_ids: IntArray) -> int:
        """Add the blocks of a request's prompt to the cache.

        Returns:
            The number of leading tokens that were already cached and need not be prefilled; always less than the whole
            prompt.
        """
        if not self._block_size:
            return 0
        state = hashlib.blake2b(digest_size=16)
        num_cached, found = 0, True
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            state.update(np.ascontiguousarray(token_ids[end - self._block_size : end]).tobytes())
            key = state.digest()
            found = found and key in self._known
            self._known.add(key)
            if found and end < len(token_ids):
                num_cached = end
        return num_cached

    def clear(self) -> None:
        """Drop all prefixes, since new weights make them invalid."""
        self._known.clear()
