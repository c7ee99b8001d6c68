"""Division of a row's tokens over ranks, and the collectives that combine their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.training.packing.layout import Int64Array, PackedLayout
from roll.training.parallel.collectives import added_up, exchange, gather, placed

__all__ = ["WHOLE", "TokenShare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """A rank's place among the ranks that compute one row together."""

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """A row's length must be a multiple of this."""
        return self._num_slices * (self.tp.size() if self.tp else 1)

    @property
    def _num_slices(self) -> int:
        return self.cp.size() if self.cp else 1

    def slice(self, layout: PackedLayout) -> slice:
        """Return the entries of the row that this cp rank computes."""
        size = layout.num_tokens // self._num_slices
        start = size * (self.cp.rank() if self.cp else 0)
        return slice(start, start + size)

    def own_tokens(self, layout: PackedLayout, of_row: NDArray[Any]) -> Tensor:
        """Return the part of a row's array [N, ...] for the tokens whose norms, experts and residuals this rank
        computes.
        """
        own = torch.from_numpy(of_row[self.slice(layout)])
        return own.chunk(self.tp.size())[self.tp.rank()] if self.tp else own

    def all_tokens(self, own: Tensor) -> Tensor:
        """Gather an array [N, ...] from the parts of all ranks, without a gradient."""
        for group in (self.tp, self.cp):
            own = own if group is None else gather(own, group)
        return own

    def added_up(self, value: Tensor) -> Tensor:
        """Sum a value over all ranks that compute one row together, in place, without a gradient."""
        for group in (self.tp, self.cp):
            value = value if group is None else added_up(value, group)
        return value

    def predictions(self, layout: PackedLayout) -> Int64Array:
        """Return the predictions made at this cp rank's entries."""
        entries = self.slice(layout)
        return np.flatnonzero((layout.rows >= entries.start) & (layout.rows < entries.stop))

    def gathered(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states [n, H] of the cp slice from the tp ranks."""
        return gather(hidden, self.tp) if self.tp else hidden

    def whole(self, found: Tensor, layout: PackedLayout) -> Tensor:
        """Gather results [M, ...] of all predictions from those [m, ...] of each cp rank."""
        if self.cp is None:
            return found
        index = torch.from_numpy(self.predictions(layout)).to(found.device)
        return placed(found, index, len(layout.rows), self.cp)

    def heads_for_tokens(self, states: Tensor) -> Tensor:
        """Exchange [n, H, d] for [n * size, H / size, d]: all tokens of this rank's heads. Heads are repeated where
        there are fewer heads than ranks.

        Raises:
            ValueError: neither the number of heads nor that of ranks divides the other.
        """
        assert self.cp is not None
        size, (length, heads, width) = self.cp.size(), states.shape
        if heads < size and size % heads == 0:
            states, heads = states.repeat_interleave(size // heads, dim=1), size
        if heads % size:
            raise ValueError(
                f"training.parallel.cp {size} does not divide the {heads} heads that each rank has: lower cp or tp"
            )
        parts = states.view(length, size, heads // size, width).transpose(0, 1)
        return exchange(parts, self.cp).reshape(size * length, heads // size, width)

    def all_heads(self, of_heads: Tensor) -> Tensor:
        """Gather [H, ...] of all heads from those of each rank."""
        for group in (self.cp, self.tp):
            of_heads = of_heads if group is None else gather(of_heads, group)
        return of_heads

    def tokens_for_heads(self, states: Tensor) -> Tensor:
        """Exchange [n * size, H / size, d] back for [n, H, d]."""
        assert self.cp is not None
        size, (length, heads, width) = self.cp.size(), states.shape
        parts = exchange(states.reshape(size, length // size, heads, width), self.cp)
        return parts.transpose(0, 1).reshape(length // size, size * heads, width)


WHOLE = TokenShare()
"""The share of a rank that computes its rows alone."""
