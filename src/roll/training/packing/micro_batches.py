"""Dynamic batching: assignment of samples to micro-batches, independent of their order of arrival. NumPy only.

    samples -> blocks -> atomic groups -> micro-batches -> one list per rank

A *block* shares computation: it is one sample, or samples of a unit whose common prefixes are computed once (`blocks`).
An *atomic group* stays in one micro-batch: it is one block, or all blocks of a unit or sequence that must not be split.
Groups are distributed over the smallest number of micro-batches that keeps each within the token budget: the largest
group first, each into the emptiest micro-batch. Therefore micro-batches, and thus ranks, have about the same load.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from roll.training.packing.blocks import (
    Block,
    BlockMember,
    build_single_sample_block,
    group_into_blocks,
    split_in_half,
    split_to_budget,
)
from roll.training.packing.layout import unify_replayed_experts
from roll.types import TrainingSample

__all__ = ["MicroBatch", "pack", "pack_by_teacher", "select_micro_batches"]

logger = logging.getLogger(__name__)


AtomicGroup: TypeAlias = tuple[Block, ...]
"""Blocks that must stay in one micro-batch."""


class MicroBatch(NamedTuple):
    """One rank's part of a micro-batch: blocks of samples with the same teacher."""

    teacher: int
    blocks: tuple[Block, ...]
    encodes_media: bool
    """True if this or another rank's part has media."""


def select_micro_batches(by_rank: Sequence[Sequence[tuple[int, tuple[Block, ...]]]], rank: int) -> list[MicroBatch]:
    """Return the micro-batches of `rank`; `by_rank` is the result of `pack_by_teacher`."""
    encodes = [any(_has_media(blocks) for _, blocks in parts) for parts in zip(*by_rank, strict=True)]
    return [MicroBatch(*own, media) for own, media in zip(by_rank[rank], encodes, strict=True)]


def _has_media(blocks: Iterable[Block]) -> bool:
    return any(member.sample.media for block in blocks for member in block.members)


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    share_prefix: bool = True,
    num_ranks: int = 1,
    every_token: bool = False,
    whole_units: bool = False,
    whole_sequences: bool = False,
    unify_experts: bool = True,
) -> list[list[tuple[Block, ...]]]:
    """Split a batch into micro-batches for `num_ranks` ranks; every rank gets the same number.

    Args:
        samples: The whole batch.
        max_tokens: The token budget of a micro-batch. Samples over budget that cannot be separated get their own
            micro-batch.
        share_prefix: If True, compute the common prefixes of a unit's samples once. A unit over budget is split into
            parts, which repeat the prefixes.
        num_ranks: The number of ranks that share the work.
        every_token: True if log-probs are needed for all tokens, not only for those in the loss.
        whole_units: If True, keep a unit within one micro-batch.
        whole_sequences: If True, keep a sequence of several samples within one micro-batch.
        unify_experts: If True, make the samples of a unit agree on the experts that are replayed for shared tokens.
            False if they agree already.

    Returns:
        The micro-batches of each rank. An empty tuple is a micro-batch without work: all ranks must run the same number
        of micro-batches.
    """
    units = _group_by_unit(samples, every_token)
    if unify_experts:
        units = [unify_replayed_experts(members) for members in units]
    groups: list[AtomicGroup]
    if whole_units:
        groups = [tuple(_build_blocks(members, share_prefix)) for members in units]
    elif whole_sequences and any(s.sequence for s in samples):
        together = _group_sequences(units, max_tokens, share_prefix, num_ranks)
        groups = [tuple(_build_blocks(members, share_prefix)) for members in together]
    else:
        blocks = (block for members in units for block in _build_blocks(members, share_prefix))
        fitting = [part for block in blocks for part in split_to_budget(block, max_tokens)]
        groups = [(block,) for block in _split_to_count(num_ranks, fitting)]
    groups.sort(key=lambda group: (-_count_tokens(group), group[0].key))
    longest = _count_tokens(groups[0]) if groups else 0
    if longest > max_tokens:
        logger.debug("a sample or unit of %d tokens exceeds the micro-batch budget of %d", longest, max_tokens)
    count = max(min(-(-sum(map(_count_tokens, groups)) // max_tokens), len(groups)), 1)
    # Every micro-batch has collectives of all ranks, so all ranks need the same number.
    count = -(-count // num_ranks) * num_ranks
    while True:
        # Greedy balancing may exceed the budget although the sum fits; then each rank gets one more micro-batch.
        bins, fullest = _balance_bins(groups, count)
        if fullest <= max(max_tokens, longest) or count >= max(len(groups), num_ranks):
            break
        count += num_ranks
    return [[tuple(bins[i]) for i in range(rank, count, num_ranks)] for rank in range(num_ranks)]


def pack_by_teacher(samples: Sequence[TrainingSample], **settings: Any) -> list[list[tuple[int, tuple[Block, ...]]]]:
    """Pack samples such that each micro-batch has only one teacher; return (teacher, blocks) pairs for each rank.

    Micro-batches with the same index have the same teacher on all ranks, because all ranks run a sharded teacher
    together.
    """
    ranks: list[list[tuple[int, tuple[Block, ...]]]] = [[] for _ in range(settings["num_ranks"])]
    for teacher in sorted({s.teacher for s in samples}):
        indices = [i for i, s in enumerate(samples) if s.teacher == teacher]
        packed = pack([samples[i] for i in indices], **settings)
        for rank, micro_batches in zip(ranks, packed, strict=True):
            rank += [(teacher, tuple(_renumber(b, indices) for b in blocks)) for blocks in micro_batches]
    return ranks


def _renumber(block: Block, indices: Sequence[int]) -> Block:
    return replace(block, members=tuple(replace(m, index=indices[m.index]) for m in block.members))


def _count_tokens(group: AtomicGroup) -> int:
    return sum(block.num_tokens for block in group)


def _group_by_unit(samples: Sequence[TrainingSample], every_token: bool) -> list[list[BlockMember]]:
    """Return the samples that must go through the network as block members, in one list per unit."""
    units: dict[int, list[BlockMember]] = {}
    for index, sample in enumerate(samples):
        if num_inputs := _count_inputs(sample, every_token):
            units.setdefault(sample.unit, []).append(BlockMember(index=index, sample=sample, num_inputs=num_inputs))
    return list(units.values())


def _build_blocks(members: Sequence[BlockMember], share_prefix: bool) -> list[Block]:
    """Return the blocks of one unit's members, sorted by key."""
    blocks = group_into_blocks(members) if share_prefix else [build_single_sample_block(member) for member in members]
    return sorted(blocks, key=lambda block: block.key)


def _group_sequences(
    units: Sequence[Sequence[BlockMember]], max_tokens: int, share_prefix: bool, count: int
) -> list[list[BlockMember]]:
    """Group the sequences of each unit into lists within `max_tokens`, if possible, without splitting a sequence.

    Lists are halved until there are at least `count` lists, if possible.
    """
    parts: list[list[list[BlockMember]]] = []
    for members in units:
        sequences: dict[str | int, list[BlockMember]] = {}
        for member in sorted(members, key=lambda member: member.key):
            sequences.setdefault(member.sample.sequence or member.index, []).append(member)
        used = max_tokens
        for own in sequences.values():
            joined = [*chain(*parts[-1]), *own] if used < max_tokens else own
            used = _count_tokens(tuple(_build_blocks(joined, share_prefix)))
            if joined is not own and used <= max_tokens:
                parts[-1].append(own)
            else:
                used = _count_tokens(tuple(_build_blocks(own, share_prefix)))
                parts.append([own])
    while len(parts) < count and any(len(part) > 1 for part in parts):
        largest = parts.pop(max(range(len(parts)), key=lambda i: (len(parts[i]), parts[i][0][0].key)))
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return [list(chain(*part)) for part in parts]


def _split_to_count(count: int, blocks: list[Block]) -> list[Block]:
    """Halve the largest block of several members until there are `count` blocks, if possible."""
    while 0 < len(blocks) < count and any(len(b.members) > 1 for b in blocks):
        largest = max((b for b in blocks if len(b.members) > 1), key=lambda b: (b.num_tokens, b.key))
        blocks.remove(largest)
        blocks += split_in_half(largest)
    return blocks


def _count_inputs(sample: TrainingSample, every_token: bool) -> int:
    if every_token:
        return len(sample) - 1
    in_loss = np.flatnonzero(sample.loss_mask[1:])
    return int(in_loss[-1]) + 1 if len(in_loss) else 0


def _balance_bins(groups: list[AtomicGroup], count: int) -> tuple[list[list[Block]], int]:
    """Put each group, in order, into the emptiest of `count` bins; return the bins and the size of the largest bin in
    tokens.
    """
    bins: list[list[Block]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for group in groups:
        load, i = heapq.heappop(heap)
        bins[i] += group
        heapq.heappush(heap, (load + _count_tokens(group), i))
    return bins, max(load for load, _ in heap)
