"""Exports of tiny random models, written by a trainer as a run writes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.training import TorchBackend, TrainerSpec
from worlds.tiny_model import write_tiny_model

__all__ = ["FAMILIES", "config_of", "export_all"]

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 700.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(16)]}
LONG |= {"long_factor": [2.0 + 0.1 * i for i in range(16)], "rope_theta": 900.0}
LAYERED = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "qwen3": ("Qwen3", {"rope_parameters": YARN}),
    "gemma2": (
        "Gemma2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "layer_types": ALTERNATING},
    ),
    "gemma3": ("Gemma3", {"rope_parameters": LAYERED, "sliding_window": 16, "layer_types": ALTERNATING}),
    "mistral": ("Mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "sliding_window": 24}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "phi4": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "mixtral": (
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
}
"""By name, the prefix of the classes, and settings that show whether the rotary parameters arrive."""


def config_of(name: str) -> Any:
    """Return the configuration of a family's tiny model."""
    prefix, settings = FAMILIES[name]
    kind = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    return kind(**copy.deepcopy(SIZES | settings))


def export_all(directory: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Write a random float32 model of each family and export it by a trainer."""
    tokenizer = write_tiny_model(directory / "tokenizer")
    found = {}
    for name in names or FAMILIES:
        torch.manual_seed(0)
        model = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")(config_of(name))
        for weight in model.state_dict().values():  # larger than at initialization, so that attention is not uniform
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.1)
        source = directory / "sources" / name
        model.save_pretrained(source)
        for file in tokenizer.glob("tokenizer*"):
            (source / file.name).write_bytes(file.read_bytes())
        spec = TrainerSpec(
            model_path=str(source),
            model=ModelConfig(path=str(source), dtype="float32"),
            training=TrainingConfig(num_steps=1, num_threads=1),
            seed=0,
        )
        found[name] = directory / "exports" / name
        TorchBackend(spec).export(found[name])
    return found
