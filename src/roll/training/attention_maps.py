"""What the live policy's attention says of a sample's tokens, without a map ever leaving this room.

    samples -> pack -> network, no gradient, up to the last observed layer
                          observed layer: queries, keys -> rows of its maps -> sums over heads' maps, then gone
            -> local and global heads of each sample -> WAAD and FAI (`algorithms.credit`)

Packed attention never has the maps, so they are computed beside it for the observed layers: the softmax of exactly
the queries and keys that the layer works with, for the answer's tokens alone. At any time, of one sample and one
layer, at most `MAP_ELEMENTS` entries exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.credit import distance_weights, head_groups
from roll.errors import UnsupportedError
from roll.training.layout import build_layout, idle_layout
from roll.training.packing import Block
from roll.training.policy import PolicyNetwork
from roll.types import AttentionStatistics, TrainingSample

__all__ = ["MapObserver", "observe_attention", "observed_layers", "with_last_token"]

MAP_ELEMENTS = {"cpu": 2**20, "other": 2**26}
"""Entries of maps, all heads together, that exist at once: 4 MiB stay in a CPU's cache, 256 MiB keep a device busy."""

NUM_LAYERS = 5


class ObservationDone(Exception):
    """Nothing that follows in the network is needed; not an error."""


def observed_layers(num_layers: int, count: int = NUM_LAYERS) -> tuple[int, ...]:
    """Evenly spaced layers of the middle third, its first and last among them; fewer where it has not so many."""
    first, last = num_layers // 3, max(-(-2 * num_layers // 3) - 1, 0)
    return tuple(sorted({round(x) for x in np.linspace(first, last, count)}))


def with_last_token(samples: Iterable[TrainingSample]) -> tuple[TrainingSample, ...]:
    """The samples, one token longer: a layout leaves out the last one, which predicts nothing but asks here as well."""
    return tuple(replace(s, token_ids=np.append(s.token_ids, s.token_ids[-1:])) for s in samples)


def observe_attention(
    network: PolicyNetwork,
    micro_batches: Sequence[Sequence[Block]],
    *,
    window: int,
    horizon: tuple[int, int],
    sharded: bool,
) -> dict[int, AttentionStatistics]:
    """Statistics by the samples' index in their batch, of this rank's micro-batches.

    Args:
        network: in evaluation mode.
        micro_batches: blocks of samples from `with_last_token`; one without blocks is run for the other ranks' sake.
        window: of WAAD, in tokens.
        horizon: of FAI, in tokens, first and last.
        sharded: whether the forward pass is collective, so that none may be cut short.

    Raises:
        UnsupportedError: the model has no attention where it is looked for.
    """
    layers = observed_layers(network.num_layers)
    found: dict[int, AttentionStatistics] = {}
    for blocks in micro_batches:
        layout = build_layout(blocks, every_token=True) if blocks else idle_layout()
        observer = MapObserver(blocks, layers, window=window, horizon=horizon, device=network.device, stop=not sharded)
        with contextlib.suppress(ObservationDone):
            network.observe(layout, observer)
        found |= observer.results()
    return found


@dataclass(slots=True)
class _Track:
    """A sample in the packed row, and what was found so far."""

    index: int
    rows: Tensor
    """[L] its tokens' entries in the row."""
    first: int
    """Of the answer's tokens."""
    distances: list[Tensor] = field(default_factory=list)
    """By observed layer: [H]; likewise [H, L - first] for the next two."""
    waad: list[Tensor] = field(default_factory=list)
    fai: list[Tensor] = field(default_factory=list)


class MapObserver:
    """Looks at the attention of one micro-batch; an `attention.Observer`.

    Args:
        blocks: of the micro-batch, of samples from `with_last_token`.
        layers: which ones to look at, ascending.
        window: of WAAD, in tokens.
        horizon: of FAI, in tokens.
        device: of the network.
        stop: raise `ObservationDone` after the last of them. Not under FSDP, which must end what it began.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layers: Sequence[int],
        *,
        window: int,
        horizon: tuple[int, int],
        device: torch.device,
        stop: bool,
    ) -> None:
        self._layers = frozenset(layers)
        self._last = max(layers)
        self._window, self._horizon = window, horizon
        self._stop = stop
        self._layer = -1
        self._tracks = list(_tracks(blocks, device))

    def __call__(self, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        """Take in the next layer: queries [N, H, d] and keys [N, K, d] of the packed row."""
        self._layer += 1
        if self._layer in self._layers:
            for track in self._tracks:
                self._look(track, queries, keys, scale, window)
        if self._layer == self._last and self._stop:
            raise ObservationDone

    def _look(self, track: _Track, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        dtype = torch.promote_types(queries.dtype, torch.float32)
        q = queries.index_select(0, track.rows[track.first :]).to(dtype) * scale
        k = keys.index_select(0, track.rows).to(dtype).permute(1, 2, 0)  # [K, d, L]
        length, num_heads = k.shape[2], q.shape[1]
        q = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [K, H / K, T, d]
        of = distance_weights(length, window=self._window, horizon=self._horizon)
        by_distance = torch.from_numpy(np.stack([of.distance, of.waad, of.fai])).to(k)
        column = torch.arange(length, device=k.device)
        waad: list[Tensor] = []
        distance, fai = k.new_zeros(num_heads), k.new_zeros(num_heads, length)
        size = MAP_ELEMENTS.get(k.device.type, MAP_ELEMENTS["other"])
        step = max(size // (num_heads * length), 1)
        for start in range(track.first, length, step):
            stop = min(start + step, length)
            apart = column[start:stop, None] - column
            unseen = apart < 0 if window is None else (apart < 0) | (apart >= window)
            part = q[:, :, start - track.first : stop - track.first]
            scores = (part.flatten(1, 2) @ k).view(num_heads, stop - start, length)
            maps = scores.masked_fill_(unseen, float("-inf")).softmax(dim=-1)
            distance_here, waad_here, fai_here = by_distance[:, apart.clamp_(min=0)]
            waad.append((maps * waad_here).sum(2))
            distance += (maps * distance_here).sum((1, 2))
            fai += (maps * fai_here).sum(1)
        track.distances.append(distance / max(length - track.first, 1))
        track.waad.append(torch.cat(waad, dim=1) if waad else k.new_zeros(num_heads, 0))
        track.fai.append((fai / torch.from_numpy(of.num_followers).to(k))[:, track.first :])

    def results(self) -> dict[int, AttentionStatistics]:
        """By the samples' index in their batch.

        Raises:
            UnsupportedError: fewer layers than expected have an attention of their own.
        """
        if self._layer < self._last:
            raise UnsupportedError(
                f"attention credit observes layers {sorted(self._layers)}, but this model's attention was called "
                f"{self._layer + 1} times: choose another algorithm.credit.type than local, global or coupled"
            )
        return {track.index: _statistics(track) for track in self._tracks}


def _statistics(track: _Track) -> AttentionStatistics:
    """Means over the sample's local and its global heads, 0 before the answer."""
    local, far = head_groups(torch.cat(track.distances).cpu().numpy())
    before = np.zeros(track.first)
    waad, fai = (torch.cat(parts).cpu().numpy() for parts in (track.waad, track.fai))
    return AttentionStatistics(
        waad=np.concatenate([before, waad[local].mean(0)]).astype(np.float32),
        fai=np.concatenate([before, fai[far].mean(0)]).astype(np.float32),
    )


def _tracks(blocks: Sequence[Block], device: torch.device) -> Iterable[_Track]:
    """Where `layout.build_layout` puts the samples."""
    start = 0
    for block in blocks:
        offset = start + block.prefix_length
        for member in block.members:
            own = member.num_inputs - block.prefix_length
            rows = np.concatenate([np.arange(start, start + block.prefix_length), np.arange(offset, offset + own)])
            yield _Track(index=member.index, rows=torch.from_numpy(rows).to(device), first=member.sample.prefix_length)
            offset += own
        start = offset
