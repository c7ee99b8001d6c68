"""Media in packed rows: spans in samples become spans in the row, and the towers run inside the network.

A medium passes through its tower once per micro-batch, even if several samples contain it. Images with different
numbers of tiles need separate runs of the tower. FSDP gathers and reduces the tower's weights on all ranks, so all
ranks agree on the number of runs; a rank with fewer runs uses a small image for the remaining runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from roll.errors import UnsupportedError, shorten
from roll.models import get_decoder
from roll.models.multimodal import MediaInputs, ModelMedia, has_media_tower
from roll.training.packing.layout import PackedLayout
from roll.training.parallel.tokens import TokenShard
from roll.types import IntArray, MediaSpan, TrainingSample

__all__ = [
    "add_positions",
    "add_sample_positions",
    "attach_media",
    "build_media_sample",
    "embed_row",
    "get_model_media",
]

_MEDIA_ATTRIBUTE = "roll_media"


def attach_media(model: Any, inputs: MediaInputs) -> None:
    """Enable media in packed rows for a model's decoder; do nothing for a model without a vision tower."""
    if has_media_tower(model):
        vars(get_decoder(model))[_MEDIA_ATTRIBUTE] = ModelMedia(model, inputs)


def get_model_media(decoder: Any) -> ModelMedia | None:
    """Return the media support that `attach_media` added to a decoder, or `None` if it added none."""
    return vars(decoder).get(_MEDIA_ATTRIBUTE)


def add_positions(decoder: Any, samples: Sequence[TrainingSample], model: str) -> tuple[TrainingSample, ...]:
    """Add the model's RoPE positions for media to samples; return them unchanged if the model has no such positions.

    Args:
        decoder: The decoder of the model.
        samples: The samples.
        model: The name of the model, for messages.

    Raises:
        UnsupportedError: A sample has media that the model does not support.
    """
    media = get_model_media(decoder)
    for sample in samples:
        for span in sample.media:
            if media is None or span.kind not in media.kinds:
                raise UnsupportedError(
                    f"sample {shorten(sample.sample_id)} has media of type '{span.kind}', on which '{model}' cannot be "
                    "trained: remove the sample"
                )
    return tuple(samples) if media is None else tuple(add_sample_positions(media, sample) for sample in samples)


def add_sample_positions(media: ModelMedia, sample: TrainingSample) -> TrainingSample:
    """Add the model's RoPE positions for media to a sample; return it unchanged if the model has no such positions."""
    if not sample.media or sample.positions is not None:
        return sample
    return replace(sample, positions=media.compute_positions(sample.token_ids, sample.media))


def embed_row(
    media: ModelMedia, layout: PackedLayout, token_shard: TokenShard, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[None]:
    """Return a context manager within which the decoder uses the features of a row's media; see
    `ModelMedia.insert_features`.
    """
    local = token_shard.select_local_tokens(layout, np.arange(layout.num_tokens))
    # Only in micro-batches, which all ranks run at the same time, not in the checks of a model.
    agree = _compute_maxima if layout.encodes_media and torch.distributed.is_initialized() else None
    return media.insert_features(layout.token_ids, layout.media, device, dtype, local, synchronize_counts=agree)


def _compute_maxima(counts: Sequence[int]) -> list[int]:
    """Return the maximum of each count over all ranks, without waiting for the device."""
    found = torch.tensor(counts)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def build_media_sample(media: ModelMedia, token_ids: IntArray, spans: Sequence[MediaSpan]) -> TrainingSample:
    """Build a sample with media in which every token but the first is predicted."""
    mask = np.arange(len(token_ids)) > 0
    sample = TrainingSample(
        sample_id="check", unit=0, prefix_length=1, token_ids=token_ids, loss_mask=mask, media=tuple(spans)
    )
    return add_sample_positions(media, sample)
