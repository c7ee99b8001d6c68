"""Sample random quantities as functions of a key: identical keys give identical numbers, in any order and for any
caller.

    key (integers) ──hash──► u in (0, 1) ──► quantile function ──► value

Therefore a rollout's length does not depend on the engine that serves it, and a request that is sent again gets the
same result. Part of the randomness may be shared (`correlation`), so that rollouts of one prompt are similar.
"""

from __future__ import annotations

import math
from statistics import NormalDist

__all__ = ["correlate", "draw_uniform", "hash_key"]

_UINT64_MASK = (1 << 64) - 1
_STANDARD_NORMAL = NormalDist()


def hash_key(*key: int) -> int:
    """Return a 64-bit hash of several integers (SplitMix64's finalizer, applied to one integer after another)."""
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = (state + (part & _UINT64_MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _UINT64_MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
        state ^= state >> 31
    return state


def draw_uniform(*key: int) -> float:
    """Return a uniformly distributed pseudo-random number in (0, 1) that depends only on the key."""
    return ((hash_key(*key) >> 11) + 0.5) / (1 << 53)


def correlate(shared: float, own: float, correlation: float) -> float:
    """Combine two uniform random numbers into a uniform number that is correlated with the first.

    Args:
        shared: Uniform number in (0, 1), the same for all correlated variables.
        own: Uniform number in (0, 1), independent for each variable.
        correlation: Correlation, between 0 and 1, of the normal variables behind two results with the same `shared`.
    """
    if correlation == 0:
        return own
    if correlation == 1:
        return shared
    z = math.sqrt(correlation) * _STANDARD_NORMAL.inv_cdf(shared) + math.sqrt(
        1 - correlation
    ) * _STANDARD_NORMAL.inv_cdf(own)
    return min(max(_STANDARD_NORMAL.cdf(z), 1e-15), 1 - 1e-15)
