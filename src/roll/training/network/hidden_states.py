"""Compute the final hidden states of a packed row, the input of all outputs of a trainer's networks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from roll.errors import ModelError
from roll.models import read_rope_scaling_length
from roll.training.attention.packed import AttentionObserver, AttentionPlan
from roll.training.network.media import embed_row, get_model_media
from roll.training.packing.layout import Int64Array, PackedLayout
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.training.transfers import to_device

__all__ = ["compute_hidden_states", "run_decoder"]


def compute_hidden_states(
    decoder: Any,
    layout: PackedLayout,
    device: torch.device,
    dtype: torch.dtype,
    observer: AttentionObserver | None = None,
    token_shard: TokenShard = WHOLE_ROW,
) -> Tensor:
    """Compute the hidden states [M, H] after the last norm for this rank's predictions of the layout.

    The state at `rows[m]` depends on all tokens before `targets[m]`, but not on that token. The policy's distribution
    over the token and the critic's value are both computed from this state.

    Args:
        decoder: The decoder of an HF model loaded with the attention `roll_packed`.
        layout: The micro-batch.
        device: The device of the network.
        dtype: The compute dtype of the network.
        observer: An observer that receives queries and keys of some layers.
        token_shard: This rank's share of the tokens, and thus of the predictions.
    """
    entries = token_shard.slice_entries(layout)
    states = run_decoder(decoder, layout, device, dtype, observer, token_shard)
    rows = layout.rows[token_shard.find_local_predictions(layout)] - entries.start
    return token_shard.gather_tp(states[0]).index_select(0, to_device(rows, device))


def run_decoder(
    decoder: Any,
    layout: PackedLayout,
    device: torch.device,
    dtype: torch.dtype,
    observer: AttentionObserver | None = None,
    token_shard: TokenShard = WHOLE_ROW,
) -> Tensor:
    """Return hidden states [1, n, H] of this rank's tokens after the decoder, or after this rank's layers.

    Raises:
        ModelError: A sequence is so long that it would change the RoPE scaling of all other sequences in its row.
    """
    length, limit = int(layout.position_ids.max()) + 1, read_rope_scaling_length(vars(decoder.config.get_text_config()))
    if limit is not None and length > limit:
        raise ModelError(
            f"a sequence of {length} tokens would change how {type(decoder).__name__} scales RoPE for all sequences "
            f"in its row (RoPE of type dynamic or longrope): train on sequences of at most {limit} tokens"
        )
    entries = token_shard.slice_entries(layout)
    media = get_model_media(decoder) if layout.encodes_media or layout.media else None
    images = None if media is None else media.find_bidirectional_images(layout.token_ids, layout.media)
    with nullcontext() if media is None else embed_row(media, layout, token_shard, device, dtype):
        output = decoder(
            input_ids=to_device(layout.token_ids[entries], device)[None],
            position_ids=to_device(_build_rotary_ids(layout, entries), device),
            use_cache=False,
            roll_plan=AttentionPlan(layout, device, dtype, observer, token_shard, images),
        )
    return output.last_hidden_state


def _build_rotary_ids(layout: PackedLayout, entries: Int64Array | slice) -> Tensor:
    """Return the RoPE positions of the tokens at the given entries, shape [1, n] or [3, 1, n]."""
    if layout.rotary_ids is None:
        return torch.from_numpy(layout.position_ids[entries])[None]
    return torch.from_numpy(layout.rotary_ids[..., entries]).unsqueeze(-2)
