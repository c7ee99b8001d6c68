"""Attention statistics of the current policy for each token, without storing attention maps.

    samples -> pack -> the forward pass of the update, or of the log-probs before it
                          observed layer: queries, keys -> some rows of its maps -> sums by head; rows are freed
            -> local and global heads of each sample -> WAAD and FAI (`algorithms.credit`)

Packed attention never materializes the maps, so they are computed separately for the observed layers: the softmax of
the layer's own queries and keys, for the answer's tokens only. All layers keep their fast attention, no gradient flows
through the maps, and at most `MAX_MAP_ELEMENTS` entries of them exist at any time.

Invariant: a sample's statistics depend only on the sample and the weights, not on its neighbors in the row, its
position in the row, or the pass in which they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.credit import compute_distance_weights, group_heads
from roll.errors import UnsupportedError
from roll.models.transfers import move_to_device, to_tensor
from roll.training.packing.blocks import Block
from roll.training.packing.layout import iter_entries
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.types import AttentionRange, AttentionStatistics

__all__ = ["AttentionMapObserver", "select_observed_layers"]

MAX_MAP_ELEMENTS = {"cpu": 2**20, "other": 2**26}
"""Largest number of map entries, over all heads, that exist at once: 4 MiB fit in a CPU's cache, 256 MiB keep an
accelerator busy."""

MAX_KEPT_PAIRS = 2**14
"""Largest number of token pairs whose distance weights are cached between layers. For a short sequence, computing the
weights takes as long as computing the maps."""

NUM_OBSERVED_LAYERS = 5
"""Default number of layers whose attention is observed."""


def select_observed_layers(num_layers: int, count: int = NUM_OBSERVED_LAYERS) -> tuple[int, ...]:
    """Return `count` evenly spaced layers of the model's middle third, including its first and last layer.

    If the middle third has fewer than `count` layers, return all of its layers.
    """
    first, last = num_layers // 3, max(-(-2 * num_layers // 3) - 1, 0)
    return tuple(sorted({round(x) for x in np.linspace(first, last, count)}))


@dataclass(slots=True)
class _SampleState:
    """A sample of the packed row, with its statistics so far. N is the number of tokens before the sample's last token
    in the loss.
    """

    index: int
    size: int
    """L, the number of tokens of the sample."""
    rows: Tensor
    """The entries of the sample's tokens in the row [N]."""
    first: int
    """The index of the first answer token."""
    window_sums: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cached results of `_compute_window_weights`, by first token and sliding window."""
    distances: list[Tensor] = field(default_factory=list)
    """The mean distance that each head attends to [H], by observed layer."""
    waad: list[Tensor] = field(default_factory=list)
    """WAAD [H, N - first], by observed layer; see `algorithms.credit`."""
    fai: list[Tensor] = field(default_factory=list)
    """FAI [H, N - first], by observed layer; see `algorithms.credit`."""


class AttentionMapObserver:
    """Computes attention statistics of one micro-batch during its forward pass; a `plan.AttentionObserver`.

    Args:
        blocks: The blocks of the micro-batch.
        layers: The layers to observe, ascending.
        attention_range: The token distances over which the statistics are taken.
        device: The device of the network.
        token_shard: This rank's shard of the row. The ranks that compute a row together split the attention heads.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layers: Sequence[int],
        attention_range: AttentionRange,
        device: torch.device,
        token_shard: TokenShard = WHOLE_ROW,
    ) -> None:
        self._share = token_shard
        self._layers = frozenset(layers)
        self._range = attention_range
        self._num_observed = 0
        self._states = list(_iter_sample_states(blocks, device))

    def is_observed(self, layer: int) -> bool:
        """Return whether the layer with this number is observed.

        If activation checkpointing runs layers again, the numbers continue after the last layer, so no layer is
        observed twice.
        """
        return layer in self._layers

    @torch.no_grad()
    def observe(self, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        """Compute and store the statistics of the next observed layer, from queries [M, H, d] and keys [M, K, d] of the
        packed row.
        """
        self._num_observed += 1
        dtype = torch.promote_types(queries.dtype, torch.float32)
        scaled, keys = queries.detach().to(dtype) * scale, keys.detach().to(dtype)
        for state in self._states:
            self._accumulate(state, scaled, keys, window)

    def _accumulate(self, state: _SampleState, scaled_queries: Tensor, keys: Tensor, window: int | None) -> None:
        q = scaled_queries.index_select(0, state.rows[state.first :])
        k = keys.index_select(0, state.rows).permute(1, 2, 0)  # [K, d, N]
        length, num_heads = k.shape[2], q.shape[1]
        q = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [K, H / K, T, d]
        waad: list[Tensor] = []
        distance, fai = k.new_zeros(num_heads), k.new_zeros(num_heads, length)
        size = MAX_MAP_ELEMENTS.get(k.device.type, MAX_MAP_ELEMENTS["other"])
        step = max(size // max(num_heads * length, 1), 1)
        for start in range(state.first, length, step):
            stop = min(start + step, length)
            unseen, weights = self._compute_window_weights(state, start, stop, window, k)
            part = q[:, :, start - state.first : stop - state.first]
            scores = (part.flatten(1, 2) @ k).view(num_heads, stop - start, length)
            maps = scores.masked_fill_(unseen, float("-inf")).softmax(dim=-1)
            waad.append((maps * weights[1]).sum(2))
            distance += (maps * weights[0]).sum((1, 2))
            fai += (maps * weights[2]).sum(1)
        state.distances.append(distance / max(length - state.first, 1))
        state.waad.append(torch.cat(waad, dim=1) if waad else k.new_zeros(num_heads, 0))
        state.fai.append(fai[:, state.first :])

    def _compute_window_weights(
        self, state: _SampleState, start: int, stop: int, window: int | None, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a mask [n, N] of the tokens that tokens `start` to `stop` cannot see, and distance weights [3, n, N].

        The mean distance, WAAD and FAI are each a sum of attention times one of the three weights; see
        `algorithms.credit`.
        """
        cached = state.window_sums.get((start, window))
        if cached is None:
            length = len(state.rows)
            of = compute_distance_weights(length, window=self._range.window, horizon=self._range.horizon)
            column = torch.arange(length, device=like.device)
            apart = column[start:stop, None] - column
            unseen = apart < 0 if window is None else (apart < 0) | (apart >= window)
            weights = torch.from_numpy(np.stack([of.distance, of.waad, of.fai])).to(like)[:, apart.clamp_(min=0)]
            # FAI of a token is a mean over the tokens that attend to it, so its weights are divided by their number.
            weights[2] /= torch.from_numpy(of.num_followers).to(like)
            cached = unseen, weights
            if apart.numel() <= MAX_KEPT_PAIRS:
                state.window_sums[start, window] = cached
        return cached

    def compute_statistics(self) -> dict[int, AttentionStatistics]:
        """Return the statistics of each sample, by index in the batch. Collective if the heads are split over
        ranks.

        Raises:
            UnsupportedError: Fewer layers than expected have softmax attention.
        """
        if self._num_observed < len(self._layers):
            raise UnsupportedError(
                f"attention credit observes layers {sorted(self._layers)}, but only {self._num_observed} of them have "
                "softmax attention in this model: choose an algorithm.credit.type other than local, global or coupled"
            )
        return {state.index: _average_statistics(state, self._share) for state in self._states}


def _average_statistics(state: _SampleState, token_shard: TokenShard) -> AttentionStatistics:
    """Return a sample's WAAD, averaged over local heads, and FAI, averaged over global heads; see `algorithms.credit`.

    Both are 0 before the answer. Tokens after the first N get the last computed WAAD and an FAI of 0.
    """
    # Local heads are found by ranking all heads, so ranks that split the heads gather them first.
    distances, *found = (
        torch.cat([token_shard.gather_heads(part) for part in parts]).cpu().numpy()
        for parts in (state.distances, state.waad, state.fai)
    )
    local, far = group_heads(distances)
    waad, fai = np.zeros(state.size, np.float32), np.zeros(state.size, np.float32)
    end = len(state.rows)
    if end > state.first:
        waad[state.first : end] = found[0][local].mean(0)
        waad[end:] = waad[end - 1]
        fai[state.first : end] = found[1][far].mean(0)
    return AttentionStatistics(waad=waad, fai=fai)


def _iter_sample_states(blocks: Iterable[Block], device: torch.device) -> Iterator[_SampleState]:
    """Yield an empty state for each sample, with the row entries of its tokens (see `layout.build_layout`), up to the
    last token in the loss.
    """
    start = 0
    for block in blocks:
        for member, _, rows in iter_entries(block, start):
            sample = member.sample
            in_loss = np.flatnonzero(sample.loss_mask)
            rows = rows[: int(in_loss[-1])] if len(in_loss) else rows[:0]
            first = min(sample.prefix_length, len(rows))
            yield _SampleState(
                index=member.index, size=len(sample), rows=move_to_device(to_tensor(rows), device), first=first
            )
        start += block.num_tokens
