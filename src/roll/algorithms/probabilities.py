"""Probabilities by their logarithms."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log_complement", "log_odds"]


def log_complement(logprobs: Tensor) -> Tensor:
    """log(1 - p); a p that rounds to 1 counts as the largest below it, so that the result is finite."""
    return (-torch.expm1(_below_one(logprobs))).log()


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)), finite as `log_complement` is."""
    return _below_one(logprobs) - log_complement(logprobs)


def _below_one(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
