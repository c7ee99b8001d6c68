"""Prefix sharing: the common prefixes of a unit's samples as a tree. NumPy only.

    a   [ prompt | turn | turn  ]            0     prompt, turn, turn
    b   [ prompt | turn | other ]    ─►      |prompt + turn|      other
    c   [ prompt | summary ]                 |prompt|             summary

A block's members are in the tree's depth-first order. Therefore one number per member defines the whole tree: the
number of leading tokens that it shares with the previous member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from roll.types import TrainingSample, build_sequence_key

__all__ = [
    "MIN_SHARED_TOKENS",
    "Block",
    "BlockMember",
    "build_single_sample_block",
    "group_into_blocks",
    "split_in_half",
    "split_to_budget",
]

MIN_SHARED_TOKENS = 32
"""Minimum number of tokens that are shared. A common prefix is computed once if it is a context (`prefix_length`), or
if it is longer by at least this number than the prefix that is already shared: a shorter segment costs more in
attention than it saves. A common prefix that exceeds a context by less is truncated to the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMember:
    """A sample in a block."""

    index: int
    """The index of the sample in its batch."""
    sample: TrainingSample
    num_inputs: int
    """The number of leading tokens that must go through the network: all before the last predicted one."""

    @property
    def key(self) -> tuple[str, int]:
        """A key that sorts the members of a loss unit, independent of the order in which samples arrive."""
        return self.sample.sample_id, self.index


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A set of samples; tokens of a common prefix are computed only once."""

    members: tuple[BlockMember, ...]
    shared: tuple[int, ...]
    """The number of leading tokens that each member shares with the previous one; 0 for the first."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that go through the network."""
        return sum(m.num_inputs - shared for m, shared in zip(self.members, self.shared, strict=True))

    @property
    def key(self) -> tuple[int, str]:
        """A key that sorts blocks, independent of the order in which samples arrive."""
        first = self.members[0].sample
        return first.unit, first.sample_id

    def slice(self, start: int, stop: int) -> Block:
        """Return a block of the members from `start` to `stop`; it computes their common prefix again."""
        return Block(members=self.members[start:stop], shared=(0, *self.shared[start + 1 : stop]))


def build_single_sample_block(member: BlockMember) -> Block:
    """Return a block that contains one sample."""
    return Block(members=(member,), shared=(0,))


def split_in_half(block: Block) -> list[Block]:
    """Split a block of several members into two blocks."""
    middle = len(block.members) // 2
    return [block.slice(0, middle), block.slice(middle, len(block.members))]


def split_to_budget(block: Block, max_tokens: int) -> list[Block]:
    """Split a block into blocks of at most `max_tokens` tokens, if possible; each new block computes its own prefix."""
    sums = list(accumulate((m.num_inputs - s for m, s in zip(block.members, block.shared, strict=True)), initial=0))

    def count_tokens(start: int, stop: int) -> int:
        return block.shared[start] + sums[stop] - sums[start]

    parts: list[tuple[int, int]] = []
    pending = [(0, len(block.members))]
    while pending:  # the largest subtrees that fit, first to last; neighbors are joined if both fit
        start, stop = pending.pop()
        if stop - start > 1 and count_tokens(start, stop) > max_tokens:
            lowest = min(block.shared[start + 1 : stop])
            cuts = [start, *(i for i in range(start + 1, stop) if block.shared[i] == lowest), stop]
            pending += reversed(list(pairwise(cuts)))
        elif parts and count_tokens(parts[-1][0], stop) <= max_tokens:
            parts[-1] = parts[-1][0], stop
        else:
            parts.append((start, stop))
    return [block.slice(start, stop) for start, stop in parts]


def group_into_blocks(members: Sequence[BlockMember]) -> list[Block]:
    """Group the samples of one unit (group or pair) into blocks; samples of different blocks share no prefix."""
    if len(members) == 1:
        return [build_single_sample_block(members[0])]
    prefixes = _PrefixTree(members)
    return [prefixes.build_block(tree) for tree in prefixes.split_into_children(0, len(members), 0)]


class _PrefixTree:
    """Sorts members lexicographically by their inputs, so that members with a common prefix are adjacent.

    A subtree of common prefixes is a triple (start, stop, depth): members `start` to `stop` share the first `depth`
    tokens. The depth of a single member is irrelevant.
    """

    def __init__(self, members: Sequence[BlockMember]) -> None:
        inputs = [(own, m) for own, m in zip(_encode_inputs(members), members, strict=True)]
        # Keys are big-endian, so the order of bytes is the order of tokens.
        inputs.sort(key=lambda pair: pair[0].tobytes())
        self._members = [m for _, m in inputs]
        self._contexts = np.array([m.sample.prefix_length for m in self._members])
        common = [_compute_common_prefix_length(a, b) for (a, _), (b, _) in pairwise(inputs)]
        self._common = np.array([0, *common])
        """The number of tokens that each member has in common with the previous one."""

    def build_block(self, tree: tuple[int, int, int]) -> Block:
        """Return a block of a subtree's members, depth first; siblings are ordered by their smallest member key."""
        members: list[BlockMember] = []
        shared: list[int] = []
        pending = [(tree, 0)]
        while pending:
            (start, stop, depth), before = pending.pop()
            if stop - start == 1:
                members.append(self._members[start])
                shared.append(before)
                continue
            first, *others = self.split_into_children(start, stop, depth)
            pending += [(other, depth) for other in reversed(others)]
            pending.append((first, before))
        return Block(members=tuple(members), shared=tuple(shared))

    def split_into_children(self, start: int, stop: int, depth: int) -> list[tuple[int, int, int]]:
        """Split members `start` to `stop`, which share `depth` tokens, into subtrees that share more tokens.

        A member that shares no more tokens forms a subtree of its own.
        """
        found: list[tuple[int, int, int]] = []
        pending = [(start, stop)]
        while pending:
            start, stop = pending.pop()
            deeper = self._measure_shared_length(start, stop, depth) if stop - start > 1 else depth
            if stop - start == 1 or deeper > depth:
                found.append((start, stop, deeper))
                continue
            common = self._common[start + 1 : stop]
            cuts = start + 1 + np.flatnonzero(common == common.min())
            pending += pairwise((start, *cuts.tolist(), stop))
        return sorted(found, key=lambda tree: min(m.key for m in self._members[tree[0] : tree[1]]))

    def _measure_shared_length(self, start: int, stop: int, depth: int) -> int:
        """Return the number of tokens that members `start` to `stop` share in the row: the length of their common
        prefix, or `depth` (the length of the parent's prefix) if the rest is too short for a separate segment.
        """
        common = int(self._common[start + 1 : stop].min())
        contexts = self._contexts[start:stop]
        context = int(contexts.max(initial=0, where=contexts <= common))
        if depth < context and common - context < MIN_SHARED_TOKENS:
            common = context
        is_prompt = depth == 0 and common == context
        return common if is_prompt or common - depth >= MIN_SHARED_TOKENS else depth


def _encode_inputs(members: Sequence[BlockMember]) -> list[np.ndarray]:
    """Return sortable keys that identify the members' inputs: the tokens [n], and the contents and positions of media.

    If samples have RoPE positions, keys are [n, 4], because the same token at another position is a different input.
    """
    samples = [m.sample for m in members]
    if not any(sample.media or sample.positions is not None for sample in samples):
        return [m.sample.token_ids[: m.num_inputs].astype(">u4") for m in members]
    keys = [build_sequence_key(sample.token_ids, sample.media).astype(">i8") for sample in samples]
    if any(sample.positions is not None for sample in samples):
        turned = [np.broadcast_to(_get_positions(sample), (3, len(sample))) for sample in samples]
        keys = [np.column_stack([key, *axes]).astype(">i8") for key, axes in zip(keys, turned, strict=True)]
    return [key[: m.num_inputs] for key, m in zip(keys, members, strict=True)]


def _get_positions(sample: TrainingSample) -> np.ndarray:
    """Return RoPE positions as integers that can be compared; fractional positions are returned as their bits."""
    if sample.positions is None:
        return np.arange(len(sample))
    exact = np.issubdtype(sample.positions.dtype, np.integer)
    return sample.positions if exact else sample.positions.astype(np.float32).view(np.int32)


def _compute_common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays of keys."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    differ = differ.any(axis=1) if differ.ndim > 1 else differ
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
