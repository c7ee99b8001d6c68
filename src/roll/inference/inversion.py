"""Drawing of tokens by inverting the cumulative distribution at one uniform number, used by both engines on a CPU.

It needs one random number per token; the largest of noisy logits (Gumbel) needs one for every vocabulary entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "invert", "running_totals"]

BLOCK = 256
"""Weights are summed in blocks of this size; a draw finds the block first, then the token inside it."""


def running_totals(weights: Tensor) -> Tensor:
    """Return cumulative sums over blocks, float64 [R, blocks], of weights [R, blocks × BLOCK]."""
    return weights.view(len(weights), -1, BLOCK).sum(-1).double().cumsum(-1)


def invert(weights: Tensor, totals: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds uniform × total, int64 [R]; never a token of weight 0.

    Args:
        weights: The non-negative weights [R, blocks × BLOCK].
        totals: The result of `running_totals`, float64 [R, blocks].
        uniforms: The random numbers, float64 in [0, 1), shape [R].
    """
    target = uniforms[:, None] * totals[:, -1:]
    block = torch.searchsorted(totals, target, right=True)
    occupied = torch.diff(totals, dim=-1, prepend=torch.zeros_like(totals[:, :1])) > 0
    block = torch.minimum(block, _last_true(occupied))
    below = torch.where(block > 0, totals.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = weights.view(len(weights), -1, BLOCK)[torch.arange(len(weights), device=weights.device), block[:, 0]]
    place = torch.searchsorted(inside.double().cumsum(-1), target - below, right=True)
    place = torch.minimum(place, _last_true(inside > 0))  # a block's sum may round differently from its cumulative sum
    return (block * BLOCK + place)[:, 0]


def _last_true(mask: Tensor) -> Tensor:
    """Return the last column that is true, shape [R, 1]."""
    return mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
