"""Which samples go through the network together. NumPy only; their order of arrival does not matter.

    samples -> blocks -> parcels -> micro-batches -> one list per rank

A *block* is what shares computation: one sample, or the samples of a unit that begin with the same prefix,
which is then computed once. A *parcel* is what goes together: one block, or all blocks of a unit that may not be
split. Parcels are spread over the smallest number of micro-batches that keeps each within the token budget, the
largest parcel first, each into the emptiest micro-batch: so micro-batches, and thus ranks, carry about the same load.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from roll.types import TrainingSample

__all__ = ["Block", "Member", "pack", "pack_by_teacher"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A sample's part in a block."""

    index: int
    """Where the sample stands in its batch."""
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
        return first.unit, first.sample_id


Parcel: TypeAlias = tuple[Block, ...]


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    share_prefix: bool = True,
    num_ranks: int = 1,
    every_token: bool = False,
    whole_units: bool = False,
) -> list[list[tuple[Block, ...]]]:
    """Cut a batch into micro-batches for `num_ranks` ranks, the same number for each.

    Args:
        samples: the whole batch.
        max_tokens: budget of a micro-batch. A parcel that alone exceeds it gets a micro-batch of its own.
        share_prefix: compute a unit's common prefix once; a unit over budget is split into parts that
            repeat it.
        num_ranks: ranks that share the work.
        every_token: log-probs are wanted of all tokens, not only of those in the loss.
        whole_units: never split a unit, neither over micro-batches nor over ranks.

    Returns:
        By rank, its micro-batches; an empty tuple is a micro-batch without work (all ranks must take part
        equally often).
    """
    blocks = _blocks(samples, sys.maxsize if whole_units else max_tokens, share_prefix, every_token)
    parcels: list[Parcel] = _units(blocks) if whole_units else [(b,) for b in _at_least(num_ranks, blocks)]
    parcels.sort(key=lambda parcel: (-_num_tokens(parcel), parcel[0].key))
    longest = _num_tokens(parcels[0]) if parcels else 0
    if longest > max_tokens:
        logger.debug("a sample or unit of %d tokens exceeds the micro-batch budget of %d", longest, max_tokens)
    count = max(min(-(-sum(map(_num_tokens, parcels)) // max_tokens), len(parcels)), 1)
    count = -(-count // num_ranks) * num_ranks
    while True:
        bins, fullest = _spread(parcels, count)
        if fullest <= max(max_tokens, longest) or count >= max(len(parcels), num_ranks):
            break
        count += num_ranks
    return [[tuple(bins[i]) for i in range(rank, count, num_ranks)] for rank in range(num_ranks)]


def pack_by_teacher(samples: Sequence[TrainingSample], **settings: Any) -> list[list[tuple[int, tuple[Block, ...]]]]:
    """As `pack`, with only samples of one teacher in a micro-batch, whose number comes before it.

    On all ranks, micro-batches in the same place are of the same teacher: ranks go through a sharded one together.
    """
    ranks: list[list[tuple[int, tuple[Block, ...]]]] = [[] for _ in range(settings["num_ranks"])]
    for teacher in sorted({s.teacher for s in samples}):
        indices = [i for i, s in enumerate(samples) if s.teacher == teacher]
        packed = pack([samples[i] for i in indices], **settings)
        for rank, micro_batches in zip(ranks, packed, strict=True):
            rank += [(teacher, tuple(_renumbered(b, indices) for b in blocks)) for blocks in micro_batches]
    return ranks


def _renumbered(block: Block, indices: Sequence[int]) -> Block:
    return replace(block, members=tuple(replace(m, index=indices[m.index]) for m in block.members))


def _num_tokens(parcel: Parcel) -> int:
    return sum(block.num_tokens for block in parcel)


def _units(blocks: Sequence[Block]) -> list[Parcel]:
    """All blocks of a unit as one parcel."""
    units: dict[int, list[Block]] = {}
    for block in sorted(blocks, key=lambda block: block.key):
        units.setdefault(block.members[0].sample.unit, []).append(block)
    return [tuple(own) for own in units.values()]


def _at_least(count: int, blocks: list[Block]) -> list[Block]:
    """Halve the largest block until there is one for every rank, as far as that goes."""
    while 0 < len(blocks) < count and any(len(b.members) > 1 for b in blocks):
        largest = max((b for b in blocks if len(b.members) > 1), key=lambda b: (b.num_tokens, b.key))
        blocks.remove(largest)
        blocks += _halves(largest)
    return blocks


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
            families.setdefault((sample.unit, sample.token_ids[:prefix].tobytes()), []).append(member)
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
    """Cut a unit into consecutive parts that fit; each repeats the prefix."""
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


def _spread(parcels: list[Parcel], count: int) -> tuple[list[list[Block]], int]:
    """Each parcel, largest first, into the emptiest of `count` bins; also returns the fullest bin's tokens."""
    bins: list[list[Block]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for parcel in parcels:
        load, i = heapq.heappop(heap)
        bins[i] += parcel
        heapq.heappush(heap, (load + _num_tokens(parcel), i))
    return bins, max(load for load, _ in heap)
