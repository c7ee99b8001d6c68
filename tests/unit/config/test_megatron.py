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


@pytest.mark.parametrize("parallel", [{"cp": 2}, {"dp_replicate": 2, "tp": 2}])
def test_config_megatron_it_divides_weights_and_layers_alone(parallel: dict[str, int]) -> None:
    TrainingConfig(num_steps=1, backend="megatron", parallel=ParallelConfig(tp=2, pp=2))
    with pytest.raises(ValidationError, match="the megatron back-end supports only tp and pp"):
        TrainingConfig(num_steps=1, backend="megatron", parallel=ParallelConfig(**parallel))


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="Megatron is installed")
def test_config_megatron_without_the_package_the_message_names_the_extra(tiny_model: Path) -> None:
    from roll.training import TrainerSpec

    training = TrainingConfig(num_steps=1, backend="megatron")
    spec = TrainerSpec(model_path=str(tiny_model), model=ModelConfig(path=str(tiny_model)), training=training)
    with pytest.raises(ModelError, match=r"pip install 'roll-rl\[megatron\]'"):
        TRAINERS.get("megatron")(spec)
