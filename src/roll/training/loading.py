"""Loading the model of a trainer, with its adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll.models import load_causal_lm
from roll.training.attention import register_attention
from roll.training.lora import add_adapters
from roll.training.spec import TrainerSpec

__all__ = ["load_model"]


def load_model(spec: TrainerSpec, dtype: torch.dtype) -> Any:
    """The HF causal language model in `dtype`, on the host.

    Dropout of the model itself is off: log-probs must be those of the policy that sampled. An adapter's stays
    as configured.

    Raises:
        ModelError: it cannot be loaded, or the adapters do not fit it.
    """
    model = load_causal_lm(
        spec.model_path, dtype, attention=register_attention(), trust_remote_code=spec.model.trust_remote_code
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if spec.model.lora is not None:
        add_adapters(model, spec.model.lora)
    if spec.training.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
