"""The critic's network: maps a packed row of tokens to the values of the states before selected tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll.errors import ModelError
from roll.models import get_decoder
from roll.models.multimodal import get_base_model, has_media_tower
from roll.training.network.distributions import Predictions
from roll.training.network.hidden_states import compute_hidden_states, run_decoder
from roll.training.network.pipeline_split import PipelineSplit
from roll.training.network.row_inputs import build_row_inputs
from roll.training.packing.layout import PackedLayout
from roll.training.parallel.collectives import divide_gradient
from roll.training.parallel.tensor import get_local_part
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.types import OutputName

__all__ = ["ValueNetwork", "compute_values", "create_value_head"]


def create_value_head(projection: Tensor) -> nn.Linear:
    """Build a zero-initialized value head with the input size H of a vocabulary projection [V, H]."""
    device = "cpu" if projection.is_meta else projection.device  # its own weights are not in any file
    head = nn.Linear(projection.shape[1], 1, device=device, dtype=projection.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def compute_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return the values [M] of hidden states [M, H], float32 or better."""
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    bias = None if head.bias is None else get_local_part(head.bias).to(dtype)
    return F.linear(hidden.to(dtype), get_local_part(head.weight).to(dtype), bias).squeeze(-1)


class ValueNetwork(nn.Module):
    """The network of a critic: V(s_t) = w h_t + b on the backbone of an HF causal language model; w and b start at 0.

    h_t is the hidden state from which the policy would predict token t; it depends on all earlier tokens, but not on
    token t. The vocabulary projection is removed; embeddings that are tied to it stay. Parameters are named as in HF's
    token classification models, but there is no dropout. The backbone of a vision-language model includes its vision
    tower.

    If the model is an HF sequence classifier, the network is a reward model: it uses the classifier's head, without a
    bias. The score of a sequence is the value of the state after its last token, so samples end with a dummy token.

    Args:
        model: An HF model loaded with the attention `roll_packed`: a causal language model, or a classifier that reads
            a sequence's last state; with LoRA, the model inside the peft wrapper.

    Raises:
        ModelError: The model has no vocabulary projection that the head could replace.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.share: TokenShard = WHOLE_ROW
        """This rank's share of every row's tokens."""
        self.pipeline_split: PipelineSplit | None = None
        """The split of the model into pipeline stages, if there are several."""
        self._backbone: str = model.base_model_prefix
        head = getattr(model, "score", None)
        self.is_reward_model = isinstance(head, nn.Linear)
        """True if the network is a reward model."""
        if isinstance(head, nn.Linear):
            self.add_module(self._backbone, model.base_model)
            self.score: nn.Linear = head
            return
        projection = model.get_output_embeddings()
        if projection is None:
            raise ModelError(f"{type(model).__name__} cannot be a critic: it has no vocabulary projection to replace")
        self.add_module(self._backbone, get_base_model(model) if has_media_tower(model) else model.get_decoder())
        self.score = create_value_head(projection.weight)

    outputs: frozenset[OutputName] = frozenset({"values"})
    """The outputs that the network supports."""

    def forward(self, layout: PackedLayout, *unused: object) -> Predictions:
        """Compute the values [M] of the states before the predicted tokens. The other arguments of a policy's
        `forward` are ignored.
        """
        if self.pipeline_split is not None and not self.pipeline_split.stage.active_chunk.is_last:
            stage, dtype = self.pipeline_split.stage, self.pipeline_split.dtype
            inputs = build_row_inputs(self.decoder, layout, stage.device, dtype, token_shard=self.share)
            return Predictions(hidden=run_decoder(self.decoder, inputs))
        weight, share = self.score.weight, self.share
        inputs = build_row_inputs(self.decoder, layout, weight.device, weight.dtype, token_shard=share)
        values = compute_values(self.score, compute_hidden_states(self.decoder, inputs))
        return Predictions(
            values=share.gather_predictions(
                values if share.tp is None else divide_gradient(values, share.tp.size()), layout
            )
        )

    projection = None
    """A critic has no projection to the vocabulary."""

    frozen_models: tuple[Any, ...] = ()
    """A critic has no frozen models."""

    @property
    def backbone(self) -> Any:
        """The model without a head."""
        return getattr(self, self._backbone)

    @property
    def decoder(self) -> Any:
        """The decoder, whose layers are sharded one by one: the backbone, or its part without the vision tower."""
        return get_decoder(self.backbone) if has_media_tower(self.backbone) else self.backbone

    def get_decoder(self) -> Any:
        """Return the decoder, with the interface of `transformers` models."""
        return self.decoder

    def get_output_embeddings(self) -> None:
        """Return `None`, like `transformers` models without a vocabulary projection."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self.decoder.config.get_text_config().vocab_size

    @property
    def root(self) -> Any:
        """The module whose parameter names are those of the HF checkpoint."""
        return self

    @property
    def architecture(self) -> str:
        """The `transformers` class that loads an exported checkpoint, if this backbone has one."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

        texts, tokens = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        known: Any = (texts if self.is_reward_model else tokens).get(type(self.backbone.config), type(self.backbone))
        return known.__name__
