"""Dynamic batching: assignment of samples to micro-batches, independent of their order of arrival. NumPy only.

    samples -> blocks -> parcels -> micro-batches -> one list per rank

A *block* shares computation: it is one sample, or samples of a unit whose common prefixes are computed once (`blocks`).
A *parcel* stays together: it is one block, or all blocks of a unit that may not be split. Parcels are spread over the
smallest number of micro-batches that keeps each within the token budget, the largest parcel first, each into the
emptiest micro-batch. So micro-batches, and thus ranks, have about the same load.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from roll.training.packing.blocks import (
    Block,
    Member,
    shared_blocks,
    single_sample_block,
    split_in_half,
    split_to_budget,
)
from roll.training.packing.layout import merge_replayed_experts
from roll.types import TrainingSample

__all__ = ["pack", "pack_by_teacher"]

logger = logging.getLogger(__name__)


Parcel: TypeAlias = tuple[Block, ...]


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    share_prefix: bool = True,
    num_ranks: int = 1,
    every_token: bool = False,
    whole_units: bool = False,
    whole_sequences: bool = False,
) -> list[list[tuple[Block, ...]]]:
    """Cut a batch into micro-batches for `num_ranks` ranks, the same number for each.

    Args:
        samples: The whole batch.
        max_tokens: The token budget of a micro-batch. A parcel that exceeds it gets a micro-batch of its own.
        share_prefix: Whether to compute the common prefixes of a unit's samples once; a unit over budget is split into
            parts that repeat them.
        num_ranks: The number of ranks that share the work.
        every_token: Whether log-probs are needed of all tokens, not only of those in the loss.
        whole_units: Whether to keep a unit within one micro-batch.
        whole_sequences: Whether to keep a sequence of several samples within one micro-batch.

    Returns:
        The micro-batches of each rank. An empty tuple is a micro-batch without work: all ranks must take part equally
        often.
    """
    units = [merge_replayed_experts(members) for members in _units(samples, every_token)]
    parcels: list[Parcel]
    if whole_units:
        parcels = [tuple(_blocks(members, share_prefix)) for members in units]
    elif whole_sequences and any(s.sequence for s in samples):
        together = _group_sequences(units, max_tokens, share_prefix, num_ranks)
        parcels = [tuple(_blocks(members, share_prefix)) for members in together]
    else:
        blocks = (block for members in units for block in _blocks(members, share_prefix))
        fitting = [part for block in blocks for part in split_to_budget(block, max_tokens)]
        parcels = [(block,) for block in _split_to_count(num_ranks, fitting)]
    parcels.sort(key=lambda parcel: (-_num_tokens(parcel), parcel[0].key))
    longest = _num_tokens(parcels[0]) if parcels else 0
    if longest > max_tokens:
        logger.debug("a sample or unit of %d tokens exceeds the micro-batch budget of %d", longest, max_tokens)
    count = max(min(-(-sum(map(_num_tokens, parcels)) // max_tokens), len(parcels)), 1)
    count = -(-count // num_ranks) * num_ranks
    while True:
        bins, fullest = _balance_bins(parcels, count)
        if fullest <= max(max_tokens, longest) or count >= max(len(parcels), num_ranks):
            break
        count += num_ranks
    return [[tuple(bins[i]) for i in range(rank, count, num_ranks)] for rank in range(num_ranks)]


def pack_by_teacher(samples: Sequence[TrainingSample], **settings: Any) -> list[list[tuple[int, tuple[Block, ...]]]]:
    """Pack like `pack`, but with samples of only one teacher in a micro-batch; return the teacher's number with each.

    Micro-batches at the same position have the same teacher on all ranks: ranks run a sharded teacher together.
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


def _num_tokens(parcel: Parcel) -> int:
    return sum(block.num_tokens for block in parcel)


def _units(samples: Sequence[TrainingSample], every_token: bool) -> list[list[Member]]:
    """Return the members that must go through the network, by unit."""
    units: dict[int, list[Member]] = {}
    for index, sample in enumerate(samples):
        if num_inputs := _num_inputs(sample, every_token):
            units.setdefault(sample.unit, []).append(Member(index=index, sample=sample, num_inputs=num_inputs))
    return list(units.values())


def _blocks(members: Sequence[Member], share_prefix: bool) -> list[Block]:
    """Return the blocks of one unit."""
    blocks = shared_blocks(members) if share_prefix else [single_sample_block(member) for member in members]
    return sorted(blocks, key=lambda block: block.key)


def _group_sequences(
    units: Sequence[Sequence[Member]], max_tokens: int, share_prefix: bool, count: int
) -> list[list[Member]]:
    """Group whole sequences of a unit, as many as fit together, into at least `count` parts if possible."""
    parts: list[list[list[Member]]] = []
    for members in units:
        sequences: dict[str | int, list[Member]] = {}
        for member in sorted(members, key=lambda member: member.key):
            sequences.setdefault(member.sample.sequence or member.index, []).append(member)
        used = max_tokens
        for own in sequences.values():
            joined = [*chain(*parts[-1]), *own] if used < max_tokens else own
            used = _num_tokens(tuple(_blocks(joined, share_prefix)))
            if joined is not own and used <= max_tokens:
                parts[-1].append(own)
            else:
                used = _num_tokens(tuple(_blocks(own, share_prefix)))
                parts.append([own])
    while len(parts) < count and any(len(part) > 1 for part in parts):
        largest = parts.pop(max(range(len(parts)), key=lambda i: (len(parts[i]), parts[i][0][0].key)))
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return [list(chain(*part)) for part in parts]


def _split_to_count(count: int, blocks: list[Block]) -> list[Block]:
    """Halve the largest block until there is one for every rank, if possible."""
    while 0 < len(blocks) < count and any(len(b.members) > 1 for b in blocks):
        largest = max((b for b in blocks if len(b.members) > 1), key=lambda b: (b.num_tokens, b.key))
        blocks.remove(largest)
        blocks += split_in_half(largest)
    return blocks


def _num_inputs(sample: TrainingSample, every_token: bool) -> int:
    if every_token:
        return len(sample) - 1
    in_loss = np.flatnonzero(sample.loss_mask[1:])
    return int(in_loss[-1]) + 1 if len(in_loss) else 0


def _balance_bins(parcels: list[Parcel], count: int) -> tuple[list[list[Block]], int]:
    """Put each parcel, largest first, into the emptiest of `count` bins; also return the tokens of the fullest bin."""
    bins: list[list[Block]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for parcel in parcels:
        load, i = heapq.heappop(heap)
        bins[i] += parcel
        heapq.heappush(heap, (load + _num_tokens(parcel), i))
    return bins, max(load for load, _ in heap)
