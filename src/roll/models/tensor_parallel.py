"""The tensor-parallel plan of a model: which of its projections are sharded by outputs, and which by inputs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

__all__ = ["COLUMN_STYLES", "ROW_STYLES", "choose_styles", "list_sharded_sizes"]

COLUMN_STYLES = ("colwise", "colwise_gather_output")
"""Styles of projections that are sharded by outputs."""
ROW_STYLES = ("rowwise", "rowwise_split_input")
"""Styles of projections that are sharded by inputs; their outputs are summed."""

# transformers 5.19 has no plan for these models, although their layers are those of models that have one (Qwen3).
_ATTENTION_AND_MLP = {
    **dict.fromkeys([f"layers.*.self_attn.{name}_proj" for name in "qkv"], "colwise"),
    **dict.fromkeys([f"layers.*.mlp.{name}_proj" for name in ("gate", "up")], "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_EXTRA_PLANS = {"qwen3_vl_text": _ATTENTION_AND_MLP}


def choose_styles(decoder: Any) -> dict[str, str]:
    """Return the tensor-parallel style of each sharded module, by name; empty if transformers has no plan.

    The plan is `base_model_tp_plan` of the model's configuration. A module without a style is replicated. These are the
    modules that the plan omits or replicates, and modules whose outputs are needed on every rank.
    """
    config = decoder.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or _EXTRA_PLANS.get(config.model_type, {})
    names = [name for name, _ in decoder.named_modules()]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        # Routed experts are sharded over expert-parallel ranks.
        if style in (*COLUMN_STYLES, *ROW_STYLES) and "experts." not in pattern.replace("shared_experts.", ""):
            styles |= {name: style for name in names if fnmatchcase(name, pattern)}
    summing = {name.rpartition(".")[0] for name, style in styles.items() if style in ROW_STYLES}
    return {name: style for name, style in styles.items() if name.rpartition(".")[0] in summing}


def list_sharded_sizes(decoder: Any, styles: dict[str, str]) -> dict[str, int]:
    """Return the sizes, by name, that the number of ranks must divide."""
    config = decoder.config.get_text_config()
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    if "colwise" not in {style for name, style in styles.items() if name.endswith(("q_proj", "k_proj"))}:
        sizes = {}  # attention is not sharded
    if (width := getattr(config, "intermediate_size", None)) is not None:
        sizes["intermediate_size"] = width
    return sizes
