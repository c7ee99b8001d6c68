"""What `training.deepspeed` takes, and what is said where DeepSpeed is missing or cannot do it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError

from roll.config.deepspeed import DeepSpeedConfig
from roll.config.model import ModelConfig
from roll.config.parallel import ParallelConfig
from roll.config.training import TRAINERS, TrainingConfig
from roll.errors import ModelError


def test_config_deepspeed_offloading_needs_a_stage_that_can() -> None:
    assert DeepSpeedConfig().zero_stage == 2
    with pytest.raises(ValidationError, match="offload_optimizer requires zero_stage >= 1"):
        DeepSpeedConfig(zero_stage=0, offload_optimizer=True)
    with pytest.raises(ValidationError, match="offload_parameters requires zero_stage 3, got 2"):
        DeepSpeedConfig(zero_stage=2, offload_parameters=True)
    DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_parameters=True)


def test_config_deepspeed_settings_of_a_back_end_that_does_not_run_are_refused() -> None:
    settings = DeepSpeedConfig(zero_stage=3)
    TrainingConfig(num_steps=1, backend="deepspeed", deepspeed=settings)
    with pytest.raises(ValidationError, match="supported only with the deepspeed back-end"):
        TrainingConfig(num_steps=1, deepspeed=settings)
    with pytest.raises(ValidationError, match="deepspeed back-end does not support training"):
        TrainingConfig(num_steps=1, backend="deepspeed", parallel=ParallelConfig(tp=2))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_config_deepspeed_without_the_package_the_message_names_the_extra(tiny_model: Path) -> None:
    from roll.training import TrainerSpec

    training = TrainingConfig(num_steps=1, backend="deepspeed")
    spec = TrainerSpec(model_path=str(tiny_model), model=ModelConfig(path=str(tiny_model)), training=training)
    with pytest.raises(ModelError, match=r"pip install 'roll-rl\[deepspeed\]'"):
        TRAINERS.get("deepspeed")(spec)
