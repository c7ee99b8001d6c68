"""Router replay: merges the expert IDs that engines recorded in a rollout's requests into those of trained sequences.

    request 1   prompt, answer                          recorded: all but the answer's last token
    request 2   prompt, answer, next turn, answer       the first three are recorded again; the first record is used

A token's log-prob is from the forward pass that generated it, so training must replay the experts of that pass. A
request that was aborted before its first token has no record. Later requests process earlier tokens again unless they
are cached, possibly with other weights and thus with other experts. Their records are used only for tokens without an
earlier record, such as an answer's last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.types import IntArray, Rollout

__all__ = ["merge_experts", "merge_records"]


def merge_records(records: Sequence[IntArray | None], length: int) -> IntArray | None:
    """Merge the expert IDs that several requests recorded for one sequence; the first known ID of a token is used.

    Args:
        records: Expert IDs of a prefix, each of shape [L, layers, k], -1 where unknown; `None` if nothing was recorded.
        length: Length of the sequence.

    Returns:
        Expert IDs, shape [length, layers, k]; `None` if nothing was recorded.
    """
    known = [record[:length] for record in records if record is not None]
    if not known:
        return None
    if len(known) == 1 and len(known[0]) == length:
        return known[0]
    merged = np.full((length, *known[0].shape[1:]), -1, known[0].dtype)
    for record in known:
        prefix = merged[: len(record)]
        np.copyto(prefix, record, where=prefix < 0)
    return merged


def merge_experts(rollout: Rollout, records: Sequence[tuple[int, IntArray | None]]) -> tuple[IntArray, ...]:
    """Merge the expert IDs of each context of a rollout (`Rollout.experts`); empty if nothing was recorded.

    Args:
        rollout: The rollout, with its branches.
        records: Per request, in order: the start of its answer in the rollout's tokens, and `Generation.experts`.
    """
    if all(record is None for _, record in records):
        return ()
    shape, dtype = next((record.shape[1:], record.dtype) for _, record in records if record is not None)
    starts = [start for start, _ in rollout.contexts]
    experts = []
    for (start, context), end in zip(rollout.contexts, [*starts[1:], len(rollout.token_ids)], strict=True):
        length = len(context) + end - start
        # Only requests of this context: another context has other positions, so its records do not align.
        known = merge_records([record for place, record in records if start <= place < end], length)
        experts.append(np.full((length, *shape), -1, dtype) if known is None else known)
    return tuple(experts)
