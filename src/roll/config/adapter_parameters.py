"""The number of weights in LoRA adapters, from the sizes of a model."""

from __future__ import annotations

from roll.config.activation_memory import ModelSizes
from roll.config.model import LoRAConfig

__all__ = ["count_lora_parameters"]


def count_lora_parameters(sizes: ModelSizes, lora: LoRAConfig) -> int:
    """Count the LoRA weights: rank x (inputs + outputs) for each linear layer of a gated decoder.

    Experts have no adapters. DoRA adds one weight for each output.
    """
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
    }
    if not sizes.experts_per_token:
        shapes |= {f"mlp.{name}_proj": (hidden, inner) for name in ("gate", "up")} | {"mlp.down_proj": (inner, hidden)}
    return sum(
        lora.get_rank(f"model.layers.{i}.{name}") * (inputs + outputs) + lora.use_dora * outputs
        for i in range(sizes.num_layers)
        for name, (inputs, outputs) in shapes.items()
    )
