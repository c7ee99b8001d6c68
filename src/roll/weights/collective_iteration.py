"""Iteration over a source of weights, which is collective over all ranks of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from roll.protocols import WeightSource

__all__ = ["iterate_to_end"]


@contextmanager
def iterate_to_end(source: WeightSource) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Run the body with an iterator over a source's tensors, and exhaust it afterwards even if the body fails.

    Other ranks wait for this one to gather every tensor.
    """
    tensors = iter(source)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass
