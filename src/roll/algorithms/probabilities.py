"""Functions of log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log1mexp", "log_odds"]


def log1mexp(logprobs: Tensor) -> Tensor:
    """Compute log(1 - p) from log p; p is clamped to the largest value below 1, so the result is finite."""
    return (-torch.expm1(_clamp_below_one(logprobs))).log()


def log_odds(logprobs: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p; p is clamped as in `log1mexp`."""
    return _clamp_below_one(logprobs) - log1mexp(logprobs)


def _clamp_below_one(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
