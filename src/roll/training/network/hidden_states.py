"""The backbone's hidden states of a packed row, from which all networks of a trainer compute their outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll.errors import ModelError
from roll.models import rope_scaling_length
from roll.training.attention.packed import AttentionPlan, Observer
from roll.training.packing.layout import Int64Array, PackedLayout
from roll.training.parallel.tokens import WHOLE, TokenShare

__all__ = ["final_hidden_states", "run_decoder"]


def final_hidden_states(
    decoder: Any,
    layout: PackedLayout,
    device: torch.device,
    dtype: torch.dtype,
    observer: Observer | None = None,
    share: TokenShare = WHOLE,
) -> Tensor:
    """Return hidden states [M, H] after the last norm, at the rows of the layout's predictions that this rank computes.

    Row `rows[m]` has attended to all tokens before `targets[m]` and not to that token itself. It is the state in which
    the token was chosen, both for the policy's distribution and for the critic's value.

    Args:
        decoder: The decoder of an HF model loaded with the attention `roll_packed`.
        layout: The micro-batch.
        device: The device of the network.
        dtype: The dtype that the network computes in.
        observer: An observer that receives queries and keys of some layers.
        share: This rank's share of the tokens, and thus of the predictions.
    """
    entries = share.slice(layout)
    states = run_decoder(decoder, layout, device, dtype, observer, share)
    rows = layout.rows[share.predictions(layout)] - entries.start
    return share.gather_tp(states[0]).index_select(0, torch.from_numpy(rows).to(device))


def run_decoder(
    decoder: Any,
    layout: PackedLayout,
    device: torch.device,
    dtype: torch.dtype,
    observer: Observer | None = None,
    share: TokenShare = WHOLE,
) -> Tensor:
    """Return hidden states [1, n, H] of this rank's tokens after the decoder, or after the layers that this rank has.

    Raises:
        ModelError: a text is so long that it changes the rotary angles of all other texts in its row.
    """
    length, limit = int(layout.position_ids.max()) + 1, rope_scaling_length(vars(decoder.config.get_text_config()))
    if limit is not None and length > limit:
        raise ModelError(
            f"a text of {length} tokens changes how {type(decoder).__name__} scales the rotary positions of all texts "
            f"in a row (RoPE of the kind dynamic or longrope): train on texts of at most {limit}"
        )
    entries = share.slice(layout)
    output = decoder(
        input_ids=torch.from_numpy(layout.token_ids[entries]).to(device)[None],
        position_ids=_rotary_ids(layout, entries).to(device),
        use_cache=False,
        roll_plan=AttentionPlan(layout, device, dtype, observer, share),
    )
    return output.last_hidden_state


def _rotary_ids(layout: PackedLayout, entries: Int64Array | slice) -> Tensor:
    """Return the positions for the rotary embedding of the tokens at some entries, shape [1, n] or [3, 1, n]."""
    if layout.rotary_ids is None:
        return torch.from_numpy(layout.position_ids[entries])[None]
    return torch.from_numpy(layout.rotary_ids[..., entries]).unsqueeze(-2)
