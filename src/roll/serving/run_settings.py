"""`roll serve run.yaml`: what a run's configuration says about the model, the trainer and the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.inference import InferenceConfig
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.config.run import RunConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["read_run_settings"]

_PER_CLIENT = "each client has adapters of its own on all linear layers"
_FIXED: dict[str, str] = {
    "use_rslora": _PER_CLIENT,
    "use_dora": _PER_CLIENT,
    "rank_pattern": _PER_CLIENT,
    "alpha_pattern": _PER_CLIENT,
    "target_modules": _PER_CLIENT,
    "dropout": _PER_CLIENT,
    "loraplus_lr_ratio": "clients send the learning rate of each update",
}
"""Keys of `model.lora` that a server does not support, with the reason."""


def read_run_settings(file: Path) -> dict[str, Any]:
    """Return the arguments of `ServeSettings` that a run's configuration determines.

    The sections `model`, `training` and `inference` apply. Data, rewards, the algorithm and the optimizer are the
    business of clients.

    Raises:
        ConfigError: The configuration is invalid, or needs what the server does not support.
    """
    config = load_config(file)
    training = getattr(config, "training", None)
    if not isinstance(training, TrainingConfig):
        raise ConfigError(f"roll serve needs a configuration that trains a language model, got '{config.pipeline}'.")
    _check(config, training)
    lora = config.model.lora or LoRAConfig(rank=32)
    inference = getattr(config, "inference", None)
    settings: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_rank": lora.rank,
        "alpha": lora.alpha,
        "num_threads": training.num_threads,
        "model_config": config.model.model_copy(update={"lora": lora}),
        "training_config": training,
    }
    if isinstance(inference, InferenceConfig):
        if inference.quantization != "none":
            raise ConfigError(
                f"roll serve does not support inference.quantization ({inference.quantization}): clients train "
                "adapters, and engines with adapters compute in the model's dtype. Remove it."
            )
        settings |= {"engine": inference.engine, "engine_options": inference}
        settings["max_context"] = getattr(inference, "max_context", None)
    return settings


def _check(config: RunConfig, training: TrainingConfig) -> None:
    if config.cluster.type != "local":
        raise ConfigError(
            f"roll serve supports one trainer rank and one engine (cluster.type local), got cluster.type "
            f"{config.cluster.type}."
        )
    if training.backend != "torch":
        raise ConfigError(f"roll serve supports only training.backend torch, got {training.backend}.")
    defaults = LoRAConfig()
    for key, reason in _FIXED.items():
        value = getattr(config.model.lora or defaults, key)
        if value != getattr(defaults, key):
            raise ConfigError(f"roll serve does not support model.lora.{key} ({value}): {reason}. Remove it.")
