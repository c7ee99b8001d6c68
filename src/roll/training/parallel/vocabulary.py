"""Softmax over a vocabulary that is divided over ranks.

Each rank has the largest logit m_i of its shard and sums over the shard relative to it. With m = max m_i and d_i = m_i
- m these become parts of the sums over the whole vocabulary, and are summed over ranks:

    sum exp(z - m)                  exp(d_i) t_i
    sum (z - m) exp(z - m)          exp(d_i) (e_i + d_i t_i)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.training.parallel.collectives import added_up, gather, one_of

__all__ = ["Words"]


class Words(NamedTuple):
    """This rank's vocabulary shard: ranks have equally many entries, in the order of ranks."""

    group: ProcessGroup

    def places(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens [M] in this rank's shard of `count` entries (0 if outside), and a mask of those
        inside.
        """
        local = targets - self.group.rank() * count
        here = (local >= 0) & (local < count)
        return local.where(here, 0), here

    def shift(self, largest: Tensor) -> Tensor:
        """Set each prediction's largest logit [M] to that of the whole vocabulary, in place; return the old minus the
        new one.
        """
        own = largest.clone()
        return own.sub_(added_up(largest, self.group, largest=True))

    def add_up(self, *parts: Tensor) -> None:
        """Sum tensors over all vocabulary shards, in place."""
        together = added_up(torch.stack(parts), self.group)
        for part, whole in zip(parts, together, strict=True):
            part.copy_(whole)

    def whole(self, weight: Tensor) -> Tensor:
        """Gather the whole projection [V, H], for results that cannot be computed by shard. Pass such results to
        `shared`.
        """
        return gather(weight, self.group)

    def shared(self, value: Tensor) -> Tensor:
        """Mark a value that every rank computes identically from the whole projection: each rank gets its part of the
        gradient.
        """
        return one_of(value, self.group.size())
