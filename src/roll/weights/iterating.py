"""Iterating a source of weights, which all ranks of a trainer do together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from roll.protocols import WeightSource

__all__ = ["to_the_end"]


@contextmanager
def to_the_end(source: WeightSource) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """A source's tensors. Whoever breaks off goes through the rest: other ranks wait for this one to gather them."""
    tensors = iter(source)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass
