"""Build the token arrays of simulated answers as views of shared arrays, to save memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.types import FinishReason, FloatArray, Generation

__all__ = ["build_generation", "build_zero_logprobs"]


def build_generation(
    request_id: str, runs: Sequence[tuple[int, int]], reason: FinishReason, engine_id: str
) -> Generation:
    """Build a generation whose token ids and log-probs are zeros.

    Args:
        request_id: Id of the request.
        runs: (policy version, number of tokens) pairs in order; at least one.
        reason: Finish reason of the answer.
        engine_id: Id of the engine that generated the answer.
    """
    num_tokens = sum(count for _, count in runs)
    if len(runs) == 1:
        versions = _get_constant(np.int32, *runs[0])
    else:
        versions = np.concatenate([_get_constant(np.int32, version, count) for version, count in runs])
    return Generation(
        request_id=request_id,
        token_ids=_get_constant(np.int32, 0, num_tokens),
        logprobs=build_zero_logprobs(num_tokens),
        policy_versions=versions,
        finish_reason=reason,
        engine_id=engine_id,
    )


def build_zero_logprobs(num_tokens: int) -> FloatArray:
    """Return log-probs that are all 0, shape [num_tokens], float32."""
    return _get_constant(np.float32, 0, num_tokens)


_shared_arrays: dict[tuple[str, int], np.ndarray] = {}
"""One read-only array for each dtype and fill value, with the length of the longest request so far; returned arrays are
views of it.
"""


def _get_constant(dtype: type[np.generic], value: int, length: int) -> np.ndarray:
    key = (dtype.__name__, value)
    array = _shared_arrays.get(key)
    if array is None or len(array) < length:
        if array is None and len(_shared_arrays) > 64:
            _shared_arrays.clear()
        array = np.full(max(1024, 1 << (length - 1).bit_length() if length else 0), value, dtype)
        array.flags.writeable = False
        _shared_arrays[key] = array
    return array[:length]
