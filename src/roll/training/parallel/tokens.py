"""Sequence and context parallelism: split a row's tokens over ranks, and gather their results.

Context parallelism is that of DeepSpeed-Ulysses (arXiv 2309.14509): before attention, ranks exchange slices of tokens
for heads (all-to-all), so that each rank attends over whole rows. Ring attention is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.models.transfers import move_to_device, to_tensor
from roll.training.packing.layout import Int64Array, PackedLayout
from roll.training.parallel.collectives import all_gather, all_gather_rows, all_reduce_, all_to_all

__all__ = ["WHOLE_ROW", "TokenShard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    """A rank's share of a row that several ranks compute together, defined by its process groups for tp and cp."""

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None

    @property
    def length_multiple(self) -> int:
        """The number of which every row's length must be a multiple, because all ranks compute equally many tokens."""
        return self._num_slices * (self.tp.size() if self.tp else 1)

    @property
    def _num_slices(self) -> int:
        return self.cp.size() if self.cp else 1

    def slice_entries(self, layout: PackedLayout) -> slice:
        """Return the entries of the row that this cp rank computes."""
        size = layout.num_tokens // self._num_slices
        start = size * (self.cp.rank() if self.cp else 0)
        return slice(start, start + size)

    def select_local_tokens(self, layout: PackedLayout, row_array: NDArray[Any]) -> NDArray[Any]:
        """Return the part of a row's array [N, ...] for the tokens whose norms, experts and residuals this rank
        computes.
        """
        tokens = row_array[self.slice_entries(layout)]
        return np.split(tokens, self.tp.size())[self.tp.rank()] if self.tp else tokens

    def gather_tokens(self, local: Tensor) -> Tensor:
        """Gather an array [N, ...] from the parts of all ranks, without a gradient."""
        for group in (self.tp, self.cp):
            local = local if group is None else all_gather(local, group)
        return local

    def all_reduce_(self, value: Tensor) -> Tensor:
        """Sum a value over all ranks that compute one row together, in place, without a gradient."""
        for group in (self.tp, self.cp):
            value = value if group is None else all_reduce_(value, group)
        return value

    def find_local_predictions(self, layout: PackedLayout) -> Int64Array:
        """Return the indices of the layout's predictions at this cp rank's entries."""
        entries = self.slice_entries(layout)
        return np.flatnonzero((layout.rows >= entries.start) & (layout.rows < entries.stop))

    def gather_tp(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states [n, H] of the cp slice from the tp ranks."""
        return all_gather(hidden, self.tp) if self.tp else hidden

    def gather_predictions(self, local: Tensor, layout: PackedLayout) -> Tensor:
        """Return the results [M, ...] of all predictions, gathered from the results [m, ...] of each cp rank."""
        if self.cp is None:
            return local
        # Losses compare tokens of whole sequences, so every cp rank needs all predictions.
        index = move_to_device(to_tensor(self.find_local_predictions(layout)), local.device)
        return all_gather_rows(local, index, len(layout.rows), self.cp)

    def all_to_all_heads(self, states: Tensor) -> Tensor:
        """Convert [n, H, d], all heads of this rank's tokens, to [n * size, H / size, d], all tokens of this rank's
        heads. Heads are repeated if there are fewer heads than ranks.

        Raises:
            ValueError: The heads cannot be split evenly over the ranks.
        """
        assert self.cp is not None
        size, (length, heads, width) = self.cp.size(), states.shape
        if heads < size and size % heads == 0:
            # Grouped-query attention with fewer key-value heads than ranks: several ranks then use the same head.
            states, heads = states.repeat_interleave(size // heads, dim=1), size
        if heads % size:
            raise ValueError(
                f"the number of heads per rank ({heads}) must be divisible by training.parallel.cp ({size}): lower cp "
                "or tp"
            )
        parts = states.view(length, size, heads // size, width).transpose(0, 1)
        return all_to_all(parts, self.cp).reshape(size * length, heads // size, width)

    def gather_heads(self, local_heads: Tensor) -> Tensor:
        """Return a tensor of all heads [H, ...], gathered from the local heads of each rank."""
        for group in (self.cp, self.tp):
            local_heads = local_heads if group is None else all_gather(local_heads, group)
        return local_heads

    def all_to_all_tokens(self, states: Tensor) -> Tensor:
        """Reverse `all_to_all_heads`: return all heads of this rank's tokens [n, H, d] from [n * size, H / size, d]."""
        assert self.cp is not None
        size, (length, heads, width) = self.cp.size(), states.shape
        parts = all_to_all(states.reshape(size, length // size, heads, width), self.cp)
        return parts.transpose(0, 1).reshape(length // size, size * heads, width)


WHOLE_ROW = TokenShard()
"""The share of a rank that computes whole rows."""
