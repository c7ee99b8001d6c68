"""What `training.backend: megatron` takes of a configuration, and what is said where it cannot run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError

from roll.config.model import ModelConfig
from roll.config.parallel import ParallelConfig
from roll.config.training import TRAINERS, TrainingConfig
from roll.errors import ModelError
from roll.training.megatron.supported import check_model


@pytest.mark.parametrize("parallel", [{"vpp": 2, "pp": 2}, {"dp_replicate": 2, "tp": 2}])
def test_config_megatron_replicas_and_model_chunks_are_rejected(parallel: dict[str, int]) -> None:
    TrainingConfig(num_steps=1, backend="megatron", parallel=ParallelConfig(tp=2, pp=2, cp=2, ep=2))
    with pytest.raises(ValidationError, match="the megatron back-end does not support dp_replicate and vpp"):
        TrainingConfig(num_steps=1, backend="megatron", parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tiled_mlp_tokens", 64, "megatron does not support tiled MLPs"),
        ("optimizer", "adamw_8bit", "the megatron back-end supports only 32-bit AdamW"),
        ("offload_activations", True, "the back-end megatron does not support this key"),
    ],
)
def test_config_megatron_ignored_settings_are_rejected(key: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainingConfig(num_steps=1, backend="megatron", **{key: value})  # type: ignore[arg-type]


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 120,
    "num_experts": 6,
}


@pytest.mark.parametrize(
    ("sizes", "changed", "message"),
    [
        ({}, {"model_type": "gemma3"}, r"supports the model families llama, .*, qwen3_moe, but this model is 'gemma3'"),
        ({}, {"hidden_act": "gelu"}, "supports gated MLPs with silu, but this model has the activation 'gelu'"),
        ({"tp": 8}, {}, r"num_attention_heads \(12\), num_key_value_heads \(4\) must be divisible by .*tp \(8\)"),
        (
            {"tp": 2, "cp": 4},
            {},
            r"num_attention_heads \(12\) must be divisible by training.parallel tp x cp \(2 x 4\)",
        ),
        ({"cp": 3}, {}, r"num_key_value_heads \(4\) must be divisible by training.parallel tp x cp \(1 x 3\)"),
        ({"ep": 4}, {}, "ep is 4, but this model has 6 experts, which is not a multiple of 4"),
        ({"ep": 2}, {"num_experts": None}, "ep is 2, but this model has no experts"),
    ],
)
def test_config_megatron_unsupported_models_are_rejected(
    sizes: dict[str, int], changed: dict[str, object], message: str
) -> None:
    check_model(QWEN3_MOE, ParallelConfig(tp=2, cp=6, ep=3))
    check_model(QWEN3_MOE, ParallelConfig(tp=4, cp=3))  # three ranks use the same key-value head
    with pytest.raises(ModelError, match=message):
        check_model(QWEN3_MOE | changed, ParallelConfig(**sizes))


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="Megatron is installed")
def test_config_megatron_missing_package_names_the_extra(tiny_model: Path) -> None:
    from roll.training import TrainerSpec

    training = TrainingConfig(num_steps=1, backend="megatron")
    spec = TrainerSpec(model_path=str(tiny_model), model=ModelConfig(path=str(tiny_model)), training=training)
    with pytest.raises(ModelError, match=r"pip install 'roll-rl\[megatron\]'"):
        TRAINERS.get("megatron")(spec)
