"""Checks that the back-end `megatron` supports a model and a layout, from config.json and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.parallel import ParallelConfig
from roll.errors import ModelError

__all__ = ["FAMILIES", "check_family", "check_model"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
"""Supported values of `model_type`. All have RoPE and gated MLPs, and the last three are MoE models."""

_SHARDED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_family(model_type: str) -> None:
    """Raise `ModelError` if the back-end does not support a model family."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"training.backend 'megatron' supports the model families {', '.join(FAMILIES)}, but this model is "
            f"'{model_type}': set training.backend to 'torch'"
        )


def check_model(config: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Check that Megatron's layers can compute a model, and that the model can be sharded with a layout.

    Args:
        config: The settings of the language model in config.json.
        parallel: The parallel sizes.

    Raises:
        ModelError: The model is not supported, or its sizes are not multiples of the parallel sizes.
    """
    check_family(config.get("model_type", ""))
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"training.backend 'megatron' supports gated MLPs with silu, but this model has the activation "
            f"'{activation}': set training.backend to 'torch'"
        )
    tp, cp = parallel.tp, parallel.cp
    sizes = {name: config[name] for name in _SHARDED_SIZES if config.get(name) is not None}
    if wrong := {name: count for name, count in sizes.items() if count % tp}:
        raise ModelError(
            ", ".join(f"{name} ({count})" for name, count in wrong.items())
            + f" must be divisible by training.parallel.tp ({tp})"
        )
    heads = sizes["num_attention_heads"]
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", sizes.get("num_key_value_heads"))):
        own = (count or heads) // tp
        # Several ranks may use the same key-value head.
        if own % cp and (name == "num_attention_heads" or cp % own):
            raise ModelError(
                f"{name} ({count}) must be divisible by training.parallel tp x cp ({tp} x {cp}): lower tp or cp"
            )
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    if parallel.ep > 1 and (not count or count % parallel.ep):
        problem = f"has {count} experts, which is not a multiple of {parallel.ep}" if count else "has no experts"
        raise ModelError(
            f"training.parallel.ep is {parallel.ep}, but this model {problem}: change training.parallel.ep, or set it "
            "to 1"
        )
