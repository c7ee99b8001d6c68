"""Attention statistics of the current policy for each token, without storing attention maps.

    samples -> pack -> the forward pass that is made anyway, for the update or for the log-probs before it
                          observed layer: queries, keys -> rows of its maps -> sums over heads' maps, then freed
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

from roll.algorithms.credit import distance_weights, head_groups
from roll.errors import UnsupportedError
from roll.training.packing.blocks import Block
from roll.training.packing.layout import iter_entries
from roll.training.parallel.tokens import WHOLE, TokenShare
from roll.types import AttentionRange, AttentionStatistics

__all__ = ["MapObserver", "select_observed_layers"]

MAX_MAP_ELEMENTS = {"cpu": 2**20, "other": 2**26}
"""Entries of maps, over all heads, that exist at once: 4 MiB fit in a CPU's cache, 256 MiB keep a device busy."""

MAX_KEPT_PAIRS = 2**14
"""Largest number of token pairs whose weights by distance are cached between layers. For a short text, computing them
takes as long as the maps."""

NUM_LAYERS = 5


def select_observed_layers(num_layers: int, count: int = NUM_LAYERS) -> tuple[int, ...]:
    """Return evenly spaced layers of the middle third, including its first and last layer.

    The result has fewer than `count` layers where the middle third has fewer.
    """
    first, last = num_layers // 3, max(-(-2 * num_layers // 3) - 1, 0)
    return tuple(sorted({round(x) for x in np.linspace(first, last, count)}))


@dataclass(slots=True)
class _Track:
    """A sample in the packed row, and its results so far. N is the number of its tokens before the last one in the
    loss."""

    index: int
    size: int
    """L, the number of its tokens."""
    rows: Tensor
    """The entries of its tokens in the row [N]."""
    first: int
    """The index of the first answer token."""
    window_sums: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cached results of `_window_weights`, by first token and sliding window."""
    distances: list[Tensor] = field(default_factory=list)
    """The mean distance that each head attends to [H], by observed layer."""
    waad: list[Tensor] = field(default_factory=list)
    """WAAD [H, N - first], by observed layer; see `algorithms.credit`."""
    fai: list[Tensor] = field(default_factory=list)
    """FAI [H, N - first], by observed layer; see `algorithms.credit`."""


class MapObserver:
    """Computes attention statistics of one micro-batch during its forward pass; a `packed.Observer`.

    Args:
        blocks: The blocks of the micro-batch.
        layers: The layers to observe, ascending.
        of: The distances that count.
        device: The device of the network.
        share: This rank's place among the ranks that divide the heads.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layers: Sequence[int],
        of: AttentionRange,
        device: torch.device,
        share: TokenShare = WHOLE,
    ) -> None:
        self._share = share
        self._layers = frozenset(layers)
        self._of = of
        self._num_looks = 0
        self._tracks = list(_tracks(blocks, device))

    def is_observed(self, layer: int) -> bool:
        """Return whether a layer is observed. Layers that activation checkpointing runs again are counted after all
        layers.
        """
        return layer in self._layers

    @torch.no_grad()
    def observe(self, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        """Accumulate the next observed layer: queries [M, H, d] and keys [M, K, d] of the packed row."""
        self._num_looks += 1
        dtype = torch.promote_types(queries.dtype, torch.float32)
        scaled, keys = queries.detach().to(dtype) * scale, keys.detach().to(dtype)
        for track in self._tracks:
            self._accumulate(track, scaled, keys, window)

    def _accumulate(self, track: _Track, scaled: Tensor, keys: Tensor, window: int | None) -> None:
        q = scaled.index_select(0, track.rows[track.first :])
        k = keys.index_select(0, track.rows).permute(1, 2, 0)  # [K, d, N]
        length, num_heads = k.shape[2], q.shape[1]
        q = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [K, H / K, T, d]
        waad: list[Tensor] = []
        distance, fai = k.new_zeros(num_heads), k.new_zeros(num_heads, length)
        size = MAX_MAP_ELEMENTS.get(k.device.type, MAX_MAP_ELEMENTS["other"])
        step = max(size // max(num_heads * length, 1), 1)
        for start in range(track.first, length, step):
            stop = min(start + step, length)
            unseen, weights = self._window_weights(track, start, stop, window, k)
            part = q[:, :, start - track.first : stop - track.first]
            scores = (part.flatten(1, 2) @ k).view(num_heads, stop - start, length)
            maps = scores.masked_fill_(unseen, float("-inf")).softmax(dim=-1)
            waad.append((maps * weights[1]).sum(2))
            distance += (maps * weights[0]).sum((1, 2))
            fai += (maps * weights[2]).sum(1)
        track.distances.append(distance / max(length - track.first, 1))
        track.waad.append(torch.cat(waad, dim=1) if waad else k.new_zeros(num_heads, 0))
        track.fai.append(fai[:, track.first :])

    def _window_weights(
        self, track: _Track, start: int, stop: int, window: int | None, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return which of the N tokens are hidden from tokens `start` to `stop` [n, N], and the weights by distance
        [3, n, N].

        The three weights are those of mean distance, WAAD and FAI.
        """
        found = track.window_sums.get((start, window))
        if found is None:
            length = len(track.rows)
            of = distance_weights(length, window=self._of.window, horizon=self._of.horizon)
            column = torch.arange(length, device=like.device)
            apart = column[start:stop, None] - column
            unseen = apart < 0 if window is None else (apart < 0) | (apart >= window)
            weights = torch.from_numpy(np.stack([of.distance, of.waad, of.fai])).to(like)[:, apart.clamp_(min=0)]
            weights[2] /= torch.from_numpy(of.num_followers).to(like)
            found = unseen, weights
            if apart.numel() <= MAX_KEPT_PAIRS:
                track.window_sums[start, window] = found
        return found

    def results(self) -> dict[int, AttentionStatistics]:
        """Return the statistics of each sample, by its index in the batch. Collective where ranks divide the heads.

        Raises:
            UnsupportedError: fewer layers than expected have an attention of their own.
        """
        if self._num_looks < len(self._layers):
            raise UnsupportedError(
                f"attention credit observes layers {sorted(self._layers)}, of which this model has {self._num_looks} "
                "with softmax attention: choose another algorithm.credit.type than local, global or coupled"
            )
        return {track.index: _statistics(track, self._share) for track in self._tracks}


def _statistics(track: _Track, share: TokenShare) -> AttentionStatistics:
    """Average over the sample's local heads (WAAD) and global heads (FAI); both are 0 before the answer.

    The tokens after the last row have no jump of attention: they repeat the WAAD of that row.
    """
    distances, *found = (
        torch.cat([share.gather_heads(part) for part in parts]).cpu().numpy()
        for parts in (track.distances, track.waad, track.fai)
    )
    local, far = head_groups(distances)
    waad, fai = np.zeros(track.size, np.float32), np.zeros(track.size, np.float32)
    end = len(track.rows)
    if end > track.first:
        waad[track.first : end] = found[0][local].mean(0)
        waad[end:] = waad[end - 1]
        fai[track.first : end] = found[1][far].mean(0)
    return AttentionStatistics(waad=waad, fai=fai)


def _tracks(blocks: Iterable[Block], device: torch.device) -> Iterator[_Track]:
    """Yield a track for each sample, at the entries where `layout.build_layout` puts it, up to the last token in the
    loss.
    """
    start = 0
    for block in blocks:
        for member, _, rows in iter_entries(block, start):
            sample = member.sample
            in_loss = np.flatnonzero(sample.loss_mask)
            rows = rows[: int(in_loss[-1])] if len(in_loss) else rows[:0]
            first = min(sample.prefix_length, len(rows))
            yield _Track(index=member.index, size=len(sample), rows=torch.from_numpy(rows).to(device), first=first)
        start += block.num_tokens
