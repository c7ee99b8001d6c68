"""Compute the final hidden states of a packed row, the input of all outputs of a trainer's networks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from roll.training.network.media import embed_row, get_model_media
from roll.training.network.row_inputs import RowInputs

__all__ = ["compute_hidden_states", "run_decoder"]


def compute_hidden_states(decoder: Any, inputs: RowInputs) -> Tensor:
    """Compute the hidden states [M, H] after the last norm for this rank's predictions of a packed row.

    The state at `rows[m]` depends on all tokens before `targets[m]`, but not on that token. The policy's distribution
    over the token and the critic's value are both computed from this state.

    Args:
        decoder: The decoder of an HF model loaded with the attention `roll_packed`.
        inputs: The row on the device of the decoder.
    """
    states = run_decoder(decoder, inputs)
    return inputs.token_shard.gather_tp(states[0]).index_select(0, inputs.tensors.rows)


def run_decoder(decoder: Any, inputs: RowInputs) -> Tensor:
    """Return hidden states [1, n, H] of this rank's tokens after the decoder, or after this rank's layers."""
    layout = inputs.layout
    media = get_model_media(decoder) if layout.encodes_media or layout.media else None
    with nullcontext() if media is None else embed_row(media, layout, inputs.token_shard, inputs.device, inputs.dtype):
        output = decoder(
            input_ids=inputs.tensors.token_ids,
            position_ids=inputs.tensors.position_ids,
            use_cache=False,
            roll_plan=inputs.plan,
        )
    return output.last_hidden_state
