"""Iteration over a `WeightSource`, which is collective over all ranks of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from roll.protocols import WeightSource

__all__ = ["iterate_to_end"]


@contextmanager
def iterate_to_end(source: WeightSource) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield an iterator over a source's tensors, and exhaust it at the end, even after an error.

    Otherwise the other ranks would wait forever for this rank to gather the remaining tensors.
    """
    tensors = iter(source)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass
