"""The network as the trainer uses it: a packed row of tokens in, log-probs of chosen tokens out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roll.errors import ModelError
from roll.training.hidden import final_hidden
from roll.training.layout import PackedLayout
from roll.training.logprobs import token_logprobs

__all__ = ["PolicyNetwork"]

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings by which some models change their logits after the vocabulary projection."""


class PolicyNetwork(nn.Module):
    """Wraps an HF causal language model, so that one `forward` covers all its parameters (which FSDP needs).

    Args:
        model: an HF model loaded with the attention `roll_packed`; with LoRA, what lies inside the peft
            wrapper.

    Raises:
        ModelError: the model computes its logits in a way that the chunked projection does not.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        changes = [n for n in _LOGIT_CHANGES if getattr(model.config, n, None) not in (None, 1, 1.0)]
        if head is None or getattr(head, "bias", None) is not None:
            raise ModelError(f"{type(model).__name__} cannot be trained: it needs a vocabulary projection without bias")
        if changes:
            raise ModelError(f"{type(model).__name__} cannot be trained: its logits are changed by {changes}")

    def forward(self, layout: PackedLayout, temperature: float) -> Tensor:
        """Log-probs [M] of the layout's predictions, float32 or better."""
        head = self.model.get_output_embeddings().weight
        hidden = final_hidden(self.decoder, layout, head.device, head.dtype)
        targets = torch.from_numpy(layout.targets).to(head.device)
        return token_logprobs(hidden, head, targets, temperature=temperature)

    @property
    def decoder(self) -> Any:
        """The backbone, whose layers are sharded one by one."""
        return self.model.get_decoder()

    @property
    def root(self) -> Any:
        """The module below which parameters have the names of the HF checkpoint."""
        return self.model

    @property
    def architecture(self) -> str:
        """The class of `transformers` that an export is loaded with."""
        return type(self.model).__name__
