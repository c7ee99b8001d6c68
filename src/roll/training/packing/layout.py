"""The layout of one micro-batch as one row of tokens, without padding. NumPy only.

    block 0                                          block 1
    [ prompt | answer a | turn b | answer b | … ]    [ sequence ]  …

A block is a tree of *segments*: tokens that all samples of a subtree share, or that only one sample has. A segment's
positions continue those of its parent. It attends to its ancestors and to itself; blocks do not attend to each other.
Entry `rows[m]` of the row predicts token `targets[m]`; several samples share a *prediction* if its token is in a shared
segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.training.packing.blocks import Block, BlockMember, group_into_blocks
from roll.types import FloatArray, IntArray, MediaSpan, slice_media

__all__ = [
    "Int64Array",
    "PackedLayout",
    "SampleSpan",
    "Segment",
    "Tree",
    "build_idle_layout",
    "build_layout",
    "iter_entries",
    "pad_layout",
]

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Adjacent tokens of the packed row that form one node in the prefix tree of their block."""

    start: int
    """The first entry of the segment in the row."""
    length: int
    """The number of tokens, at least 1."""
    parent: int = -1
    """The index of the segment that this one continues, in the same tree; -1 for the root."""
    position: int = 0
    """The number of tokens in the ancestors of the segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """The segments of a block in the row; each segment comes after its parent."""

    segments: tuple[Segment, ...]

    @property
    def start(self) -> int:
        """The first entry of the block in the row."""
        return self.segments[0].start

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the block."""
        return sum(segment.length for segment in self.segments)

    def list_contexts(self) -> list[Int64Array]:
        """Return the row entries of each segment's ancestors, starting at the root."""
        paths: list[Int64Array] = []
        contexts: list[Int64Array] = []
        for s in self.segments:
            contexts.append(paths[s.parent] if s.parent >= 0 else np.zeros(0, dtype=np.int64))
            paths.append(np.concatenate([contexts[-1], np.arange(s.start, s.start + s.length)]))
        return contexts

    def build_ancestor_mask(self) -> NDArray[np.bool_]:
        """Return a mask [S, S] whose entry [i, j] is true if segment j is i or an ancestor of i, so that i attends to
        j.
        """
        lineage = np.eye(len(self.segments), dtype=np.bool_)
        for i, s in enumerate(self.segments):
            if s.parent >= 0:
                lineage[i] |= lineage[s.parent]
        return lineage


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpan:
    """The n predicted tokens of one sample, and the predictions of these tokens in the row."""

    index: int
    """The index of the sample in its batch."""
    token_index: Int64Array
    """The position of each predicted token in the sample."""
    prediction_index: Int64Array
    """The prediction (entry of `rows` and `targets`) of each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """A micro-batch as one packed row of N tokens with M predictions, the input of a network."""

    token_ids: Int64Array
    """The tokens [N]."""
    position_ids: Int64Array
    """The positions of the tokens in their samples [N]."""
    blocks: tuple[Tree, ...]
    rows: Int64Array
    """The entries of the row that make the predictions [M]."""
    targets: Int64Array
    """The predicted tokens [M]."""
    spans: tuple[SampleSpan, ...]
    teacher: int = 0
    """The number of the teacher whose divergence is computed, if any."""
    num_padding: int = 0
    """The number of padding tokens at the end."""
    uses: Int64Array
    """The number of samples that share each token [N]; 0 for padding."""
    media: tuple[MediaSpan, ...] = ()
    """The spans of media in the row; shared media appear once."""
    encodes_media: bool = False
    """True if a row of this micro-batch has media, on this rank or another: all ranks then run the vision tower."""
    rotary_ids: Int64Array | FloatArray | None = None
    """The RoPE positions [N] or [3, N], float32 if some are fractional. If `None`, `position_ids` are used."""
    experts: Int64Array | None = None
    """The experts [N, layers, k] that routers must choose, or -1 where the router chooses. Samples that share a token
    have the same experts; see `unify_replayed_experts`."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens, N."""
        return len(self.token_ids)


def build_idle_layout(*, teacher: int = 0) -> PackedLayout:
    """Return the smallest possible layout, for a rank without samples that must take part in collectives."""
    zero = np.zeros(1, dtype=np.int64)
    block = Tree(segments=(Segment(start=0, length=1),))
    return PackedLayout(
        token_ids=zero,
        position_ids=zero,
        blocks=(block,),
        rows=zero,
        targets=zero,
        spans=(),
        teacher=teacher,
        num_padding=1,
        uses=zero,
    )


def build_layout(
    blocks: Iterable[Block], *, every_token: bool = False, teacher: int = 0, shared_predictions: bool = True
) -> PackedLayout:
    """Build the layout of a micro-batch from its blocks.

    Args:
        blocks: The blocks of one micro-batch, at least one.
        every_token: If True, predict all tokens but the first, instead of only the tokens in the loss.
        teacher: The number of the teacher whose divergence is computed.
        shared_predictions: If True, samples share the predictions of shared tokens. If False, each sample has separate
            predictions, because the requested outputs may differ.
    """
    tokens: list[NDArray[np.int32]] = []
    positions: list[Int64Array] = []
    trees: list[Tree] = []
    rows: list[Int64Array] = []
    targets: list[NDArray[np.int32]] = []
    spans: list[SampleSpan] = []
    experts: list[IntArray | None] = []
    paths: list[Int64Array] = []
    media: list[MediaSpan] = []
    rotary: list[NDArray[Any] | None] = []
    start = num_predictions = 0
    for block in blocks:
        predictions = np.full(block.num_tokens, -1, dtype=np.int64)  # the prediction of each token, by entry
        for member, shared, entries in iter_entries(block, start):
            sample = member.sample
            paths.append(entries)
            token_index = find_predicted_tokens(member, every_token)
            predicted = entries[find_shareable_tokens(member, token_index)] - start
            known = np.concatenate([predictions[predicted], np.full(len(token_index) - len(predicted), -1)])
            new = known < 0
            known[new] = num_predictions + np.arange(new.sum())
            if shared_predictions:
                predictions[predicted] = known[: len(predicted)]
            num_predictions += int(new.sum())
            rows.append(entries[token_index[new] - 1])
            targets.append(sample.predicted_ids[token_index[new]])
            spans.append(SampleSpan(index=member.index, token_index=token_index, prediction_index=known))
            tokens.append(sample.token_ids[shared : member.num_inputs])
            experts.append(None if sample.experts is None else sample.experts[shared : member.num_inputs])
            positions.append(np.arange(shared, member.num_inputs, dtype=np.int64))
            own_start = int(entries[shared]) if shared < member.num_inputs else 0
            media += slice_media(sample.media, shared, member.num_inputs, own_start) if sample.media else ()
            rotary.append(None if sample.positions is None else sample.positions[..., shared : member.num_inputs])
        trees.append(_build_tree(block, start))
        start += block.num_tokens
    return PackedLayout(
        token_ids=np.concatenate(tokens).astype(np.int64),
        position_ids=np.concatenate(positions),
        blocks=tuple(trees),
        rows=np.concatenate(rows),
        targets=np.concatenate(targets).astype(np.int64),
        spans=tuple(spans),
        teacher=teacher,
        uses=np.bincount(np.concatenate(paths), minlength=start),
        media=tuple(media),
        rotary_ids=_gather_rotary_ids(rotary, positions),
        experts=_gather_experts(experts, [len(own) for own in tokens]),
    )


def pad_layout(layout: PackedLayout, multiple: int) -> PackedLayout:
    """Return a layout padded to a multiple of `multiple` tokens, by an extra block without predictions."""
    missing = -layout.num_tokens % multiple
    if not missing:
        return layout
    # A separate tree: padding and sequences do not attend to each other.
    block = Tree(segments=(Segment(start=layout.num_tokens, length=missing),))
    experts = layout.experts
    if experts is not None:
        experts = np.concatenate([experts, np.full((missing, *experts.shape[1:]), -1, dtype=np.int64)])
    return replace(
        layout,
        token_ids=np.concatenate([layout.token_ids, np.zeros(missing, dtype=np.int64)]),
        position_ids=np.concatenate([layout.position_ids, np.arange(missing)]),
        blocks=(*layout.blocks, block),
        num_padding=layout.num_padding + missing,
        uses=np.concatenate([layout.uses, np.zeros(missing, dtype=np.int64)]),
        rotary_ids=_gather_rotary_ids([layout.rotary_ids, None], [layout.position_ids, np.arange(missing)]),
        experts=experts,
    )


def _gather_rotary_ids(
    positions: Sequence[NDArray[Any] | None], counts: Sequence[Int64Array]
) -> Int64Array | FloatArray | None:
    """Return the RoPE positions [N] or [3, N] of a row from its parts; a part without RoPE positions gets its token
    positions. Return `None` if no part has RoPE positions.
    """
    given = [own for own in positions if own is not None]
    if not given:
        return None
    axes = max(own.ndim for own in given)
    parts = [count if own is None else own for own, count in zip(positions, counts, strict=True)]
    wide = [np.broadcast_to(part, (3, part.shape[-1])) if axes > 1 else part for part in parts]
    joined = np.concatenate(wide, axis=-1)
    is_exact = all(np.issubdtype(own.dtype, np.integer) for own in given)
    return joined.astype(np.int64) if is_exact else joined.astype(np.float32)


def _gather_experts(choices: Sequence[IntArray | None], lengths: Sequence[int]) -> Int64Array | None:
    shape = next((own.shape[1:] for own in choices if own is not None), None)
    if shape is None:
        return None
    parts = [np.full((n, *shape), -1) if own is None else own for own, n in zip(choices, lengths, strict=True)]
    return np.concatenate(parts).astype(np.int64)


def find_predicted_tokens(member: BlockMember, every_token: bool) -> Int64Array:
    """Return the positions of the tokens whose log-probs are needed. The first token is excluded, because it is not
    predicted.
    """
    if every_token:
        return np.arange(1, len(member.sample), dtype=np.int64)
    return np.flatnonzero(member.sample.loss_mask[1:]) + 1


def find_shareable_tokens(member: BlockMember, token_index: Int64Array) -> Int64Array:
    """Return the predicted tokens whose predictions other samples of the block may share.

    A sample with targets of its own shares none, because another token may follow the same prefix in each sample.
    """
    return token_index[token_index < member.num_inputs] if member.sample.target_ids is None else token_index[:0]


def iter_entries(block: Block, start: int) -> Iterator[tuple[BlockMember, int, Int64Array]]:
    """Yield the row entries of each sample of a block; the block's first token is entry `start` of the row.

    Yields:
        The member, the number of tokens that it shares with earlier members, and the entries [num_inputs] of its
        tokens.
    """
    entries = np.zeros(0, dtype=np.int64)
    for member, shared in zip(block.members, block.shared, strict=True):
        own = member.num_inputs - shared
        entries = np.concatenate([entries[:shared], start + np.arange(own)])
        start += own
        yield member, shared, entries


def unify_replayed_experts(members: Sequence[BlockMember]) -> list[BlockMember]:
    """Make the samples of a unit agree on the experts that are replayed for shared tokens.

    Rollouts may have recorded different experts for the tokens of a common prompt if engines computed the prompt more
    than once. All samples of the unit use the experts of the first sample that has recorded experts, in the order of
    `BlockMember.key`, even if the samples are not packed together. Therefore log-probs do not depend on packing.
    """
    known = next((m.sample.experts for m in members if m.sample.experts is not None), None)
    if known is None or len(members) == 1:
        return list(members)
    agreed: dict[int, BlockMember] = {}
    for block in group_into_blocks(members):
        own = {member.index: (member, entries) for member, _, entries in iter_entries(block, 0)}
        chosen = np.full((block.num_tokens, *known.shape[1:]), -1, known.dtype)
        for member, entries in sorted(own.values(), key=lambda pair: pair[0].key):
            experts = member.sample.experts
            if experts is not None:
                chosen[entries] = np.where(chosen[entries] < 0, experts[: len(entries)], chosen[entries])
        for index, (member, entries) in own.items():
            experts = np.full((len(member.sample), *known.shape[1:]), -1, known.dtype)
            experts[: len(entries)] = chosen[entries]
            agreed[index] = replace(member, sample=replace(member.sample, experts=experts))
    return [agreed[member.index] for member in members]


def _build_tree(block: Block, start: int) -> Tree:
    """Build the tree of a block: a member's own tokens form one segment, which is split where later members branch
    off."""
    starts, parents, cuts = [], [], []
    path: list[int] = []  # members whose own tokens form the sequence of the previous member
    for i, (member, shared) in enumerate(zip(block.members, block.shared, strict=True)):
        while path and block.shared[path[-1]] >= shared:
            path.pop()
        starts.append(start)
        parents.append(path[-1] if path else -1)
        cuts.append({shared, member.num_inputs})
        start += member.num_inputs - shared
        if shared < member.num_inputs:
            if path:
                cuts[path[-1]].add(shared)
            path.append(i)
    segments: list[Segment] = []
    ends: dict[tuple[int, int], int] = {}  # the segment that ends at a position, by member and position
    for i, own in enumerate(cuts):
        parent = ends[parents[i], block.shared[i]] if parents[i] >= 0 and len(own) > 1 else -1
        for position, end in pairwise(sorted(own)):
            first = starts[i] + position - block.shared[i]
            segments.append(Segment(start=first, length=end - position, parent=parent, position=position))
            parent = ends[i, end] = len(segments) - 1
    return Tree(segments=tuple(segments))
