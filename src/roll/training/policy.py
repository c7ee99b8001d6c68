"""The network as the trainer uses it: a packed row of tokens in, log-probs of chosen tokens out.

On request also the entropy of their distributions, and how far these are from those of the policy as it was at first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roll.errors import ModelError
from roll.training.attention import Observer
from roll.training.distributions import Predictions, Projection, token_statistics
from roll.training.hidden_states import final_hidden_states
from roll.training.layout import PackedLayout
from roll.training.lora import adapters_off
from roll.training.value import new_value_head, values_of
from roll.types import Needs, Output

__all__ = ["PolicyNetwork"]

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings by which some models change their logits after the vocabulary projection."""


class PolicyNetwork(nn.Module):
    """Wraps an HF causal language model, so that one `forward` covers all its parameters (which FSDP needs).

    Args:
        model: an HF model loaded with the attention `roll_packed`; with LoRA, what lies inside the peft
            wrapper.
        reference: the same model as it was at first, frozen, for the divergence from it; with LoRA it is not needed.
        value_head: also say the value of the state before a token, from the hidden state that predicts it.

    Raises:
        ModelError: the model computes its logits in a way that the chunked projection does not.
    """

    def __init__(self, model: Any, reference: Any = None, *, value_head: bool = False) -> None:
        super().__init__()
        self.model = model
        self.reference = reference
        head = model.get_output_embeddings()
        changes = [n for n in _LOGIT_CHANGES if getattr(model.config, n, None) not in (None, 1, 1.0)]
        if head is None or getattr(head, "bias", None) is not None:
            raise ModelError(f"{type(model).__name__} cannot be trained: it needs a vocabulary projection without bias")
        if changes:
            raise ModelError(f"{type(model).__name__} cannot be trained: its logits are changed by {changes}")
        self.value_head = new_value_head(head.weight) if value_head else None

    def forward(
        self,
        layout: PackedLayout,
        temperature: float,
        needs: Needs,
        observer: Observer | None = None,
    ) -> Predictions:
        """Log-probs [M] of the layout's predictions, float32 or better, and what else is needed.

        Args:
            layout: the micro-batch.
            temperature: of the distributions.
            needs: of a loss.
            observer: is shown every layer's queries and keys.

        Raises:
            ValueError: the divergence is asked for, and there is neither a reference nor an adapter to leave out.
        """
        targets = torch.from_numpy(layout.targets).to(self.device)
        policy = _project(self.model, layout, observer)
        found = token_statistics(
            policy,
            targets,
            temperature=temperature,
            entropy=needs.entropy,
            reference=self._project_reference(layout) if needs.full_kl else None,
        )
        if not needs.values:
            return found
        assert self.value_head is not None, "a policy without a value head was asked for values"
        return found._replace(values=values_of(self.value_head, policy.hidden))

    @torch.no_grad()
    def _project_reference(self, layout: PackedLayout) -> Projection:
        if self.reference is not None:
            return _project(self.reference, layout)
        with adapters_off(self.model):
            return _project(self.model, layout)

    @property
    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._head.device

    @property
    def heads(self) -> dict[str, nn.Parameter]:
        """What is trained beside the model, by name: engines and exports do not have it."""
        return {} if self.value_head is None else dict(self.value_head.named_parameters("value_head"))

    @property
    def outputs(self) -> frozenset[Output]:
        """What it can say."""
        return frozenset(("logprobs", "attention") if self.value_head is None else ("logprobs", "attention", "values"))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.model.config.get_text_config().num_hidden_layers

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


def _project(model: Any, layout: PackedLayout, observer: Observer | None = None) -> Projection:
    """Hidden states at the layout's predictions, and the projection to the vocabulary."""
    weight = model.get_output_embeddings().weight
    return Projection(final_hidden_states(model.get_decoder(), layout, weight.device, weight.dtype, observer), weight)
