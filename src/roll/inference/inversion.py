"""Samples tokens by inverting the cumulative distribution; used by both engines on a CPU.

This needs one uniform random number per token. The Gumbel-max trick needs one per vocabulary entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK_SIZE", "compute_running_totals", "sample_by_inversion"]

BLOCK_SIZE = 256
"""Weights are summed in blocks of this size. Sampling first finds the block, then the token in the block, so the
cumulative sum in float64 runs over blocks instead of the vocabulary.
"""


def compute_running_totals(weights: Tensor) -> Tensor:
    """Return the cumulative sums of blocks, float64 [R, blocks], for weights [R, blocks × BLOCK_SIZE]."""
    return weights.view(len(weights), -1, BLOCK_SIZE).sum(-1).double().cumsum(-1)


def sample_by_inversion(weights: Tensor, totals: Tensor, uniforms: Tensor) -> Tensor:
    """Return, for each row, the first token with cumulative weight > uniform × total, int64 [R]; its weight is > 0.

    Args:
        weights: The non-negative weights [R, blocks × BLOCK_SIZE].
        totals: The result of `compute_running_totals`, float64 [R, blocks].
        uniforms: The random numbers, float64 in [0, 1), shape [R].
    """
    target = uniforms[:, None] * totals[:, -1:]
    block = torch.searchsorted(totals, target, right=True)
    occupied = torch.diff(totals, dim=-1, prepend=torch.zeros_like(totals[:, :1])) > 0
    # Rounding may make the target equal to the total, beyond all blocks: then the last block with any weight is used.
    block = torch.minimum(block, _find_last_true(occupied))
    below = torch.where(block > 0, totals.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = weights.view(len(weights), -1, BLOCK_SIZE)[torch.arange(len(weights), device=weights.device), block[:, 0]]
    place = torch.searchsorted(inside.double().cumsum(-1), target - below, right=True)
    place = torch.minimum(
        place, _find_last_true(inside > 0)
    )  # a block's sum may round differently from its cumulative sum
    return (block * BLOCK_SIZE + place)[:, 0]


def _find_last_true(mask: Tensor) -> Tensor:
    """Return the index of the last true column in each row, [R, 1]."""
    return mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
