"""Vocabulary parallelism: softmax over a vocabulary that is sharded over ranks.

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

from roll.training.parallel.collectives import all_gather, all_reduce_, divide_gradient

__all__ = ["VocabShard"]


class VocabShard(NamedTuple):
    """This rank's vocabulary shard. All shards have the same number of entries, in rank order."""

    group: ProcessGroup

    def compute_local_indices(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens [M] in this rank's shard of `count` entries (0 for tokens outside the shard),
        and a mask of the tokens inside the shard.
        """
        local = targets - self.group.rank() * count
        here = (local >= 0) & (local < count)
        return local.where(here, 0), here

    def reduce_max_(self, max_logits: Tensor) -> Tensor:
        """Set each prediction's largest logit [M] to the maximum over the whole vocabulary, in place; return the old
        values minus the new values.
        """
        own = max_logits.clone()
        return own.sub_(all_reduce_(max_logits, self.group, use_max=True))

    def all_reduce_(self, *parts: Tensor) -> None:
        """Sum tensors over all vocabulary shards, in place."""
        # One collective for all tensors: each is small, so latency dominates.
        together = all_reduce_(torch.stack(parts), self.group)
        for part, whole in zip(parts, together, strict=True):
            part.copy_(whole)

    def gather_projection(self, weight: Tensor) -> Tensor:
        """Gather the whole projection [V, H], for results that cannot be computed by shard.

        Pass the results to `divide_gradient`.
        """
        return all_gather(weight, self.group)

    def divide_gradient(self, value: Tensor) -> Tensor:
        """Return the value unchanged, but divide its gradient by the number of ranks that compute it."""
        return divide_gradient(value, self.group.size())
