"""One micro-batch as one row of tokens, without padding. NumPy only.

    block 0                                   block 1
    [ prefix | response a | response b | … ]  [ sequence ]  …

Positions of a response go on from its prefix's. A response attends to its prefix and to itself; a block sees
no other. Entry `rows[m]` of the row predicts token `targets[m]`; several samples may share such a
*prediction* (inside a prefix).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll.training.packing import Block, Member

__all__ = ["Int64Array", "PackedLayout", "SampleSpan", "Segments", "build_layout", "idle_layout"]

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Where a block lies in the row: its prefix first, then its responses, one after the other."""

    start: int
    prefix_length: int
    """0 for a plain sequence."""
    response_lengths: tuple[int, ...]
    """Each at least 1."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return self.prefix_length + sum(self.response_lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpan:
    """Which predictions belong to a sample; [n] arrays."""

    index: int
    """Where the sample stands in its batch."""
    token_index: Int64Array
    """Position in the sample of each predicted token."""
    prediction_index: Int64Array
    """The prediction (entry of `rows` and `targets`) that gives its log-prob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """A micro-batch, ready for the network. N tokens, M predictions."""

    token_ids: Int64Array
    """[N]"""
    position_ids: Int64Array
    """[N]"""
    blocks: tuple[Segments, ...]
    rows: Int64Array
    """[M]"""
    targets: Int64Array
    """[M]"""
    spans: tuple[SampleSpan, ...]
    teacher: int = 0
    """Which of several teachers the policy is compared with, where it is."""

    @property
    def num_tokens(self) -> int:
        """N"""
        return len(self.token_ids)


def idle_layout(*, teacher: int = 0) -> PackedLayout:
    """The smallest micro-batch, of no sample: for a rank that must take part without work."""
    zero = np.zeros(1, dtype=np.int64)
    block = Segments(start=0, prefix_length=0, response_lengths=(1,))
    return PackedLayout(
        token_ids=zero, position_ids=zero, blocks=(block,), rows=zero, targets=zero, spans=(), teacher=teacher
    )


def build_layout(blocks: Iterable[Block], *, every_token: bool = False, teacher: int = 0) -> PackedLayout:
    """Lay blocks out in a row.

    Args:
        blocks: of one micro-batch, at least one.
        every_token: predict all tokens but the first, instead of those that the loss counts.
        teacher: which of several the policy is compared with.
    """
    tokens: list[NDArray[np.int32]] = []
    positions: list[Int64Array] = []
    segments: list[Segments] = []
    rows: list[Int64Array] = []
    targets: list[NDArray[np.int32]] = []
    spans: list[SampleSpan] = []
    start = num_predictions = 0
    for block in blocks:
        prefix = block.prefix_length
        first = block.members[0].sample
        tokens.append(first.token_ids[:prefix])
        positions.append(np.arange(prefix, dtype=np.int64))
        offset = start + prefix
        in_prefix = np.full(prefix, -1, dtype=np.int64)  # predictions of prefix tokens, the same for every sample
        for member in block.members:
            sample = member.sample
            token_index = predicted_tokens(member, every_token)
            shared, own = token_index[token_index < prefix], token_index[token_index >= prefix]
            new = shared[in_prefix[shared] < 0]
            in_prefix[new] = num_predictions + np.arange(len(new))
            first_own = num_predictions + len(new)
            num_predictions = first_own + len(own)
            rows += [start + new - 1, np.where(own > prefix, offset + own - 1 - prefix, start + own - 1)]
            targets += [sample.token_ids[new], sample.token_ids[own]]
            prediction_index = np.concatenate([in_prefix[shared], first_own + np.arange(len(own))])
            spans.append(SampleSpan(index=member.index, token_index=token_index, prediction_index=prediction_index))
            tokens.append(sample.token_ids[prefix : member.num_inputs])
            positions.append(np.arange(prefix, member.num_inputs, dtype=np.int64))
            offset += member.num_inputs - prefix
        lengths = tuple(m.num_inputs - prefix for m in block.members if m.num_inputs > prefix)
        segments.append(Segments(start=start, prefix_length=prefix, response_lengths=lengths))
        start = offset
    return PackedLayout(
        token_ids=np.concatenate(tokens).astype(np.int64),
        position_ids=np.concatenate(positions),
        blocks=tuple(segments),
        rows=np.concatenate(rows),
        targets=np.concatenate(targets).astype(np.int64),
        spans=tuple(spans),
        teacher=teacher,
    )


def predicted_tokens(member: Member, every_token: bool) -> Int64Array:
    """Positions of the tokens whose log-probs are wanted; never the first, which nothing predicts."""
    if every_token:
        return np.arange(1, len(member.sample), dtype=np.int64)
    return np.flatnonzero(member.sample.loss_mask[1:]) + 1
