"""Tiny random models of every family that the trainer takes, built from their HF configuration classes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "Family", "write_model"]

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of `transformers`, and what makes a tiny model of it show all that it does."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    moe: bool = False
    """Whether a router chooses experts."""

    @property
    def classes(self) -> tuple[Any, Any]:
        """Of its configuration and of its model."""
        model = self.model or f"{self.config}ForCausalLM"
        return getattr(transformers, f"{self.config}Config"), getattr(transformers, model)


FAMILIES: dict[str, Family] = {
    "biased llama": Family(config="Llama", settings={"attention_bias": True, "mlp_bias": True}),
    "llama3": Family(
        config="Llama",
        settings={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama4": Family(
        config="Llama4Text",
        model="Llama4ForCausalLM",
        settings=EXPERTS
        | {
            "num_hidden_layers": 4,
            "attention_chunk_size": 5,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
        },
        moe=True,
    ),
    "qwen2": Family(config="Qwen2", settings={"tie_word_embeddings": False}),
    "qwen3": Family(config="Qwen3", settings={"tie_word_embeddings": True}),
    "gemma2": Family(
        config="Gemma2",
        settings={
            "sliding_window": 6,
            "layer_types": ALTERNATING,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "gemma3": Family(
        config="Gemma3Text",
        model="Gemma3ForCausalLM",
        settings={
            "sliding_window": 6,
            "layer_types": ALTERNATING,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "mistral": Family(config="Mistral", settings={"sliding_window": 6}),
    "phi3": Family(config="Phi3", settings={"sliding_window": 6}),
    "phi4": Family(config="Phi3", settings={"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "glm4": Family(config="Glm4", settings={"partial_rotary_factor": 0.5, "attention_bias": True}),
    "olmo2": Family(config="Olmo2"),
    "smollm3": Family(config="SmolLM3", settings={"no_rope_layers": [1, 0]}),
    "granite": Family(config="Granite", settings={"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "cohere2": Family(
        config="Cohere2", settings={"sliding_window": 6, "layer_types": ALTERNATING, "logit_scale": 0.25}
    ),
    "deepseek-v2": Family(config="DeepseekV2", settings=MLA | {"topk_method": "group_limited_greedy"}, moe=True),
    "deepseek-v3": Family(config="DeepseekV3", settings=MLA, moe=True),
    "gpt-oss": Family(config="GptOss", settings=EXPERTS | {"sliding_window": 6, "layer_types": ALTERNATING}, moe=True),
    "qwen3-next": Family(
        config="Qwen3Next",
        settings=EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
        moe=True,
    ),
    "lfm2": Family(
        config="Lfm2",
        settings={"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "qwen3-moe": Family(config="Qwen3Moe", settings=EXPERTS | {"norm_topk_prob": True}, moe=True),
    "mixtral": Family(config="Mixtral", settings=EXPERTS | {"sliding_window": 6, "router_jitter_noise": 0.1}, moe=True),
    "phi-moe": Family(
        config="Phimoe",
        settings=EXPERTS | {"sliding_window": 6, "input_jitter_noise": 0.1, "lm_head_bias": False},
        moe=True,
    ),
    "glm4-moe": Family(
        config="Glm4Moe",
        settings=EXPERTS
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        moe=True,
    ),
}


def write_model(path: Path, tokenizer: Path, family: Family, **settings: Any) -> Path:
    """A tiny random model, with the tokenizer of the tiny Llama."""
    torch.manual_seed(0)
    config_class, model_class = family.classes
    model = model_class(config_class(**(SIZES | family.settings | settings)))
    for name, tensor in model.state_dict().items():  # larger than at initialisation, so that nothing is uniform
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=0.2)
        elif name.endswith(("sinks", "e_score_correction_bias", "bias")):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(path)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, path)
    return path
