"""The inputs of a network for one packed row: tokens, positions, predictions, and the attention plan.

All inputs are built on the CPU and copied to the device together; see `roll.models.transfers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from roll.errors import ModelError
from roll.models import read_rope_scaling_length
from roll.models.transfers import move_to_device, to_tensor
from roll.training.attention.plan import AttentionObserver, AttentionPlan, PlanBuilder, PlanNeeds, PlanTensors
from roll.training.network.media import get_model_media
from roll.training.packing.layout import Int64Array, PackedLayout
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard

__all__ = ["RowInputs", "RowTensors", "build_row_inputs"]

_NEEDS: WeakKeyDictionary[Any, PlanNeeds] = WeakKeyDictionary()
"""Tensors that the layers of each decoder requested from the plans of earlier rows."""


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The tensors of a row that a rank computes with."""

    token_ids: Tensor
    """This rank's tokens [1, n]."""
    position_ids: Tensor
    """The RoPE positions of `token_ids`, shape [1, n] or [3, 1, n]."""
    rows: Tensor
    """The positions of this rank's predictions [m], relative to the rank's first token."""
    targets: Tensor
    """The predicted tokens [m]."""
    top_ids: Tensor | None
    """Other tokens [m, k] whose log-probs are computed, if there are any."""
    plan: PlanTensors


@dataclass(frozen=True, slots=True)
class RowInputs:
    """A packed row as the input of a decoder."""

    layout: PackedLayout
    device: torch.device
    dtype: torch.dtype
    """The compute dtype of the network."""
    token_shard: TokenShard
    """This rank's share of the tokens, and thus of the predictions."""
    tensors: RowTensors
    plan: AttentionPlan

    def drop_experts(self) -> RowInputs:
        """Return the inputs for a frozen model, without replayed experts and without an observer."""
        return replace(self, plan=self.plan.drop_experts())


def build_row_inputs(
    decoder: Any,
    layout: PackedLayout,
    device: torch.device,
    dtype: torch.dtype,
    observer: AttentionObserver | None = None,
    token_shard: TokenShard = WHOLE_ROW,
    top_ids: Int64Array | None = None,
) -> RowInputs:
    """Build the inputs of a decoder, with one copy to the device.

    Args:
        decoder: The decoder of an HF model loaded with the attention `roll_packed`.
        layout: The micro-batch.
        device: The device of the network.
        dtype: The compute dtype of the network.
        observer: An observer that receives queries and keys of some layers.
        token_shard: This rank's share of the tokens.
        top_ids: Other tokens [M, k] whose log-probs are computed at each prediction.

    Raises:
        ModelError: A sequence is so long that it would change the RoPE scaling of the other sequences in its row.
    """
    _check_length(decoder, layout)
    media = get_model_media(decoder) if layout.encodes_media or layout.media else None
    images = None if media is None else media.find_bidirectional_images(layout.token_ids, layout.media)
    builder, needs = PlanBuilder(layout, device, dtype, token_shard, images), _NEEDS.setdefault(decoder, PlanNeeds())
    entries, mine = token_shard.slice_entries(layout), token_shard.find_local_predictions(layout)
    rotary_ids = layout.position_ids if layout.rotary_ids is None else layout.rotary_ids
    host = RowTensors(
        token_ids=to_tensor(layout.token_ids[entries])[None],
        position_ids=to_tensor(rotary_ids[..., entries]).unsqueeze(-2),
        rows=to_tensor(layout.rows[mine] - entries.start),
        targets=to_tensor(layout.targets[mine]),
        top_ids=None if top_ids is None else to_tensor(top_ids[mine]),
        plan=builder.build(needs),
    )
    tensors = move_to_device(host, device)
    plan = AttentionPlan(builder, tensors.plan, needs, observer)
    return RowInputs(layout, device, dtype, token_shard, tensors, plan)


def _check_length(decoder: Any, layout: PackedLayout) -> None:
    length, limit = int(layout.position_ids.max()) + 1, read_rope_scaling_length(vars(decoder.config.get_text_config()))
    if limit is not None and length > limit:
        raise ModelError(
            f"a sequence of {length} tokens would change how {type(decoder).__name__} scales RoPE for all sequences "
            f"in its row (RoPE of type dynamic or longrope): train on sequences of at most {limit} tokens"
        )
