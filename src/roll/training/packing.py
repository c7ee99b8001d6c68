"""Which samples go through the network together. NumPy only; their order of arrival does not matter.

    samples -> blocks -> micro-batches -> one list per rank

A *block* is what shares computation: one sample, or the samples of a group that begin with the same prefix,
which is then computed once. Blocks are spread over the smallest number of micro-batches that keeps each
within the token budget, the largest block first, each into the emptiest micro-batch: so micro-batches, and
thus ranks, carry about the same load.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.types import TrainingSample

__all__ = ["Block", "Member", "pack"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A sample's part in a block."""

    index: int
    """Of the sample in its batch."""
    sample: TrainingSample
    num_inputs: int
    """Leading tokens that must go through the network: all before the last predicted one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Samples whose first `prefix_length` tokens are equal and computed once."""

    prefix_length: int
    members: tuple[Member, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the network."""
        return self.prefix_length + sum(m.num_inputs - self.prefix_length for m in self.members)

    @property
    def key(self) -> tuple[int, str]:
        """Orders blocks independently of how their samples arrived."""
        first = self.members[0].sample
        return first.group_id, first.sample_id


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    share_prefix: bool = True,
    num_ranks: int = 1,
    every_token: bool = False,
) -> list[list[tuple[Block, ...]]]:
    """Cut a batch into micro-batches for `num_ranks` ranks, the same number for each.

    Args:
        samples: the whole batch.
        max_tokens: budget of a micro-batch. A sample that alone exceeds it gets a micro-batch of its own.
        share_prefix: compute a group's common prefix once; a group over budget is split into parts that
            repeat it.
        num_ranks: ranks that share the work.
        every_token: log-probs are wanted of all tokens, not only of those in the loss.

    Returns:
        By rank, its micro-batches; an empty tuple is a micro-batch without work (all ranks must take part
        equally often).
    """
    blocks = _blocks(samples, max_tokens, share_prefix, every_token)
    while 0 < len(blocks) < num_ranks and any(len(b.members) > 1 for b in blocks):
        largest = max((b for b in blocks if len(b.members) > 1), key=lambda b: (b.num_tokens, b.key))
        blocks.remove(largest)
        blocks += _halves(largest)
    blocks.sort(key=lambda b: (-b.num_tokens, b.key))
    longest = blocks[0].num_tokens if blocks else 0
    if longest > max_tokens:
        logger.debug("a sample of %d tokens exceeds the micro-batch budget of %d", longest, max_tokens)
    count = max(min(-(-sum(b.num_tokens for b in blocks) // max_tokens), len(blocks)), 1)
    count = -(-count // num_ranks) * num_ranks
    while True:
        bins, fullest = _spread(blocks, count)
        if fullest <= max(max_tokens, longest) or count >= max(len(blocks), num_ranks):
            break
        count += num_ranks
    return [[tuple(bins[i]) for i in range(rank, count, num_ranks)] for rank in range(num_ranks)]


def _blocks(samples: Sequence[TrainingSample], max_tokens: int, share_prefix: bool, every_token: bool) -> list[Block]:
    families: dict[tuple[int, bytes], list[Member]] = {}
    alone: list[Block] = []
    for index, sample in enumerate(samples):
        num_inputs = _num_inputs(sample, every_token)
        if num_inputs == 0:
            continue
        prefix = sample.prefix_length if share_prefix else 0
        member = Member(index=index, sample=sample, num_inputs=num_inputs)
        if 0 < prefix <= num_inputs:
            families.setdefault((sample.group_id, sample.token_ids[:prefix].tobytes()), []).append(member)
        else:
            alone.append(Block(prefix_length=0, members=(member,)))
    shared = [part for family in families.values() for part in _within_budget(family, max_tokens)]
    return shared + alone


def _num_inputs(sample: TrainingSample, every_token: bool) -> int:
    if every_token:
        return len(sample) - 1
    in_loss = np.flatnonzero(sample.loss_mask[1:])
    return int(in_loss[-1]) + 1 if len(in_loss) else 0


def _within_budget(family: list[Member], max_tokens: int) -> list[Block]:
    """Cut a group into consecutive parts that fit; each repeats the prefix."""
    family.sort(key=lambda m: (m.sample.sample_id, m.index))
    prefix = family[0].sample.prefix_length
    parts: list[list[Member]] = [[]]
    used = prefix
    for member in family:
        length = member.num_inputs - prefix
        if parts[-1] and used + length > max_tokens:
            parts.append([])
            used = prefix
        parts[-1].append(member)
        used += length
    return [_block(part) for part in parts]


def _block(members: list[Member]) -> Block:
    """A block of one sample shares nothing: it is a plain sequence."""
    prefix = members[0].sample.prefix_length if len(members) > 1 else 0
    return Block(prefix_length=prefix, members=tuple(members))


def _halves(block: Block) -> list[Block]:
    middle = len(block.members) // 2
    return [_block(list(block.members[:middle])), _block(list(block.members[middle:]))]


def _spread(blocks: list[Block], count: int) -> tuple[list[list[Block]], int]:
    """Each block, largest first, into the emptiest of `count` bins; also returns the fullest bin's tokens."""
    bins: list[list[Block]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for block in blocks:
        load, i = heapq.heappop(heap)
        bins[i].append(block)
        heapq.heappush(heap, (load + block.num_tokens, i))
    return bins, max(load for load, _ in heap)
