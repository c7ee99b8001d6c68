"""Attention credit: advantages are weighted by how the policy's attention uses each token (arXiv 2510.13554).

    d_h    = mean_t sum_s A_h[t, s] (t - s)                       lowest / highest 30 % of heads: local / global
    WAAD_t = sum_s A_local[t, s] min(t - s, W)                    high: the token attends beyond its phrase
    FAI_s  = mean over t in [s + 10, s + 100] of A_global[t, s]   high: later tokens attend to it, an anchor

    local    amplify the tokens with the largest jumps |WAAD_t - WAAD_t+1|: a phrase begins
    global   amplify the anchors: the tokens with the largest FAI
    coupled  an anchor inside a phrase shares its amplification with the token that introduced the phrase

A is the mean of the heads' attention maps, row t the attention of token t to the tokens s <= t. The trainer computes
the maps and their statistics (`roll.training.attention.maps`) with the distance weights below; this module converts the
statistics to factors.

Choices where the paper leaves details open:

* Heads are sorted per sample, over all observed layers. Therefore a factor depends only on its sample, not on the rest
  of the batch. Means over t cover only the answer's tokens, because only these are weighted; the maps' rows for the
  prompt are not needed.
* The last loss token of a sample predicts no token and does not pass through the network, so it has no row in the map.
  It gets the WAAD of the token before it, so that neither of the two has a jump.
* The last token of a turn has no jump, because the environment's tokens follow it.
* The range of FAI ends at the end of the sample; FAI is 0 for tokens without a later token in the range.
* Only loss tokens are chosen or share amplification; their number is rounded up. A token whose score is 0 is never
  chosen: in an answer shorter than the range of FAI, no token is an anchor and none is amplified.
* `coupled` needs two thresholds and a fraction that the paper does not specify; the thresholds are quantiles over the
  tokens of the sample, so they are independent of the model. See `compute_credit_factors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roll.types import AttentionStatistics, BoolArray, FloatArray

__all__ = [
    "CreditPattern",
    "DistanceWeights",
    "compute_credit_factors",
    "compute_distance_weights",
    "compute_waad_jumps",
    "group_heads",
    "mask_top_fraction",
]

CreditPattern: TypeAlias = Literal["local", "global", "coupled"]
Int64Array: TypeAlias = NDArray[np.int64]

HEAD_FRACTION = 0.3
"""Fraction of the heads that are local, and fraction of the heads that are global."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceWeights:
    """Weights of the entries A[t, s] of an attention map by their distance t - s = 0 … N - 1."""

    distance: FloatArray
    """[N] t - s; a head's distance is the attention-weighted sum over s, averaged over t."""
    waad: FloatArray
    """[N] min(t - s, W); WAAD_t is the attention-weighted sum over s."""
    fai: FloatArray
    """[N] 1 within FAI's range, else 0: FAI_s is the sum over t, divided by `num_followers`."""
    num_followers: FloatArray
    """[N] number of tokens within FAI's range of token s, at least 1."""


def compute_distance_weights(num_tokens: int, *, window: int, horizon: tuple[int, int]) -> DistanceWeights:
    """Compute the distance weights of a sample of N tokens.

    Args:
        num_tokens: Number of tokens of the sample, N.
        window: W; WAAD caps distances at this number of tokens.
        horizon: First and last distance that FAI counts, in tokens, both inclusive.
    """
    first, last = horizon
    assert 1 <= first <= last and window >= 1, (horizon, window)
    distance = np.arange(num_tokens)
    followers = np.minimum(num_tokens - 1, distance + last) - (distance + first) + 1
    return DistanceWeights(
        distance=distance.astype(np.float32),
        waad=np.minimum(distance, window).astype(np.float32),
        fai=((distance >= first) & (distance <= last)).astype(np.float32),
        num_followers=np.maximum(followers, 1).astype(np.float32),
    )


def group_heads(distances: NDArray[np.floating], fraction: float = HEAD_FRACTION) -> tuple[Int64Array, Int64Array]:
    """Return the indices of the local heads (smallest mean distances) and of the global heads (largest mean distances).

    Each group has at least one head.

    Args:
        distances: Mean attention distance of each head, shape [K].
        fraction: Fraction of the heads in each group.
    """
    count = max(round(fraction * len(distances)), 1)
    order = np.argsort(distances, kind="stable")
    return np.sort(order[:count]), np.sort(order[-count:])


def compute_waad_jumps(waad: FloatArray, mask: BoolArray) -> FloatArray:
    """Compute |WAAD_t - WAAD_t+1| between adjacent tokens of `mask`, shape [L]; 0 for the last token of a turn."""
    together = mask & np.append(mask[1:], False)[: len(mask)]
    return np.where(together, np.abs(np.diff(waad, append=waad[-1:])), np.float32(0.0))


def mask_top_fraction(scores: FloatArray, mask: BoolArray, fraction: float) -> BoolArray:
    """Return a mask [L] of the tokens with the largest scores.

    The number of tokens is the number in `mask` times `fraction`, rounded up; ties go to the earlier token. A token
    with score 0 is never chosen.
    """
    candidates = np.flatnonzero(mask & (scores > 0))
    count = math.ceil(fraction * int(mask.sum()) - 1e-9)  # 0.1 x 30 is a little above 3
    chosen = candidates[np.argsort(-scores[candidates], kind="stable")[:count]]
    result = np.zeros(len(scores), dtype=np.bool_)
    result[chosen] = True
    return result


def compute_credit_factors(
    statistics: AttentionStatistics,
    mask: BoolArray,
    *,
    pattern: CreditPattern,
    amplification: float = 1.5,
    share: float = 0.4,
    introduction_window: int = 3,
    introduction_share: float = 0.5,
    waad_quantile: float = 0.5,
    jump_quantile: float = 0.6,
) -> FloatArray:
    """Compute the factors by which the advantages of a sample's tokens are multiplied, shape [L].

    Factors are between 1 and `amplification`, and 1 outside `mask`.

    In the coupled pattern, an anchor t is *dominated* if it does not attend far back and one of the tokens just before
    it begins a phrase: WAAD_t is at most the `waad_quantile` of the sample, and the largest jump among the
    `introduction_window` tokens before it is at least the `jump_quantile` of the sample. The token with this jump (the
    nearest one in a tie) is the anchor's introduction. A dominated anchor keeps (1 - introduction_share) of its
    amplification; the rest goes to the introduction. A token that is amplified twice gets the sum, capped at
    `amplification`.

    Args:
        statistics: Attention statistics of the sample, [L] each.
        mask: Tokens that contribute to the loss, shape [L].
        pattern: The rule that selects tokens: `local`, `global` or `coupled`, see the module docstring.
        amplification: Factor on chosen tokens.
        share: Fraction of the sample's tokens that is chosen.
        introduction_window: Number of preceding tokens that are searched for an introduction; the paper tests 1 to 3.
        introduction_share: Fraction of the amplification that moves to the introduction; with the default of one half,
            the anchor and its introduction get the same amplification.
        waad_quantile: Maximum WAAD of a dominated anchor, as a quantile of the sample's WAAD; by default the median.
        jump_quantile: Minimum jump of an introduction, as a quantile of the sample's jumps; with the default of
            1 - 0.4, introductions are the tokens that the local pattern amplifies.
    """
    gain = amplification - 1.0
    jump = compute_waad_jumps(statistics.waad, mask)
    if pattern == "local":
        return _amplify(gain * mask_top_fraction(jump, mask, share), amplification)
    anchors = mask_top_fraction(statistics.fai, mask, share)
    gains = gain * anchors
    if pattern == "global" or not anchors.any():
        return _amplify(gains, amplification)
    calm = statistics.waad <= np.quantile(statistics.waad[mask], waad_quantile)
    largest, source = _find_preceding_max(np.where(mask, jump, -np.inf), introduction_window)
    opened = (largest >= np.quantile(jump[mask], jump_quantile)) & (largest > 0)
    dominated = anchors & calm & opened
    gains[dominated] -= introduction_share * gain
    gains[np.unique(source[dominated])] += introduction_share * gain
    return _amplify(gains, amplification)


def _amplify(gains: NDArray[np.floating], amplification: float) -> FloatArray:
    return np.clip(1.0 + gains, 1.0, amplification).astype(np.float32)


def _find_preceding_max(scores: NDArray[np.floating], window: int) -> tuple[NDArray[np.floating], Int64Array]:
    """Return the largest score among the `window` tokens before each token, and its index; ties go to the nearest
    token.
    """
    largest = np.full(len(scores), -np.inf)
    source = np.zeros(len(scores), dtype=np.int64)
    for back in range(1, min(window, len(scores) - 1) + 1):
        better = scores[:-back] > largest[back:]
        at = np.flatnonzero(better) + back
        largest[at], source[at] = scores[at - back], at - back
    return largest, source
