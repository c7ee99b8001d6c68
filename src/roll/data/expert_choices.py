"""Merge the expert IDs that engines chose in a rollout's requests into those of the trained sequences.

    request 1   prompt, answer                          recorded: all but the answer's last token
    request 2   prompt, answer, next turn, answer       recorded again: the first three; the first record counts

A token's log-prob is from the forward pass that generated it, so training must replay the experts of that pass. A
request that was aborted before its first token has no record. Later requests read tokens again, and recompute them
unless they are cached: perhaps with other weights, and so with other experts. Their records only fill gaps, such as an
answer's last token, which no earlier pass read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.types import IntArray, Rollout

__all__ = ["experts_by_context", "first_known"]


def first_known(records: Sequence[IntArray | None], length: int) -> IntArray | None:
    """Merge several records of prefixes of one sequence; where they overlap, the earliest record counts.

    Args:
        records: Expert IDs of a prefix, each of shape [L, layers, k], -1 where unknown; `None` if nothing was recorded.
        length: Length of the sequence.

    Returns:
        Expert IDs, shape [length, layers, k]; `None` without any record.
    """
    known = [record[:length] for record in records if record is not None]
    if not known:
        return None
    if len(known) == 1 and len(known[0]) == length:
        return known[0]
    found = np.full((length, *known[0].shape[1:]), -1, known[0].dtype)
    for record in known:
        own = found[: len(record)]
        np.copyto(own, record, where=own < 0)
    return found


def experts_by_context(rollout: Rollout, records: Sequence[tuple[int, IntArray | None]]) -> tuple[IntArray, ...]:
    """Compute `Rollout.experts` of a rollout that is otherwise complete.

    Args:
        rollout: The rollout, with its branches.
        records: Per request, in order: the start of its answer in the rollout's tokens, and `Generation.experts`.
    """
    if all(record is None for _, record in records):
        return ()
    shape, dtype = next((record.shape[1:], record.dtype) for _, record in records if record is not None)
    starts = [start for start, _ in rollout.contexts]
    found = []
    for (start, context), end in zip(rollout.contexts, [*starts[1:], len(rollout.token_ids)], strict=True):
        length = len(context) + end - start
        own = [record for place, record in records if start <= place < end]
        known = first_known(own, length)
        found.append(np.full((length, *shape), -1, dtype) if known is None else known)
    return tuple(found)
