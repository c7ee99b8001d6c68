"""`roll serve run.yaml`: reads the model, trainer and engine settings from the configuration of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.diffusion import DiffusionModelConfig
from roll.config.inference import InferenceConfig
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.config.run import RunConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["read_run_settings"]

_PER_CLIENT = "each client has adapters of its own on all linear layers"
_UNSUPPORTED_LORA_KEYS: dict[str, str] = {
    "use_rslora": _PER_CLIENT,
    "use_dora": _PER_CLIENT,
    "rank_pattern": _PER_CLIENT,
    "alpha_pattern": _PER_CLIENT,
    "target_modules": _PER_CLIENT,
    "dropout": _PER_CLIENT,
    "loraplus_lr_ratio": "clients send the learning rate of each update",
}
"""The keys of `model.lora` that a server does not support, with the reasons."""


def read_run_settings(file: Path) -> dict[str, Any]:
    """Return the arguments of `ServeSettings` that a run's configuration determines.

    The sections `model`, `training`, `inference` and `cluster` apply. Clients
    choose data, rewards, the algorithm and the optimizer settings.

    Raises:
        ConfigError: The configuration is invalid, or has a setting that the server does not support.
    """
    config = load_config(file)
    training = getattr(config, "training", None)
    if not isinstance(training, TrainingConfig) or isinstance(config.model, DiffusionModelConfig):
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
        "cluster": config.cluster,
        "roles": {name: config.roles[name] for name in ("actor_train", "actor_infer") if name in config.roles},
    }
    if isinstance(inference, InferenceConfig):
        if inference.quantization != "none":
            raise ConfigError(
                f"roll serve does not support inference.quantization ({inference.quantization}): clients train "
                "adapters, and engines with adapters compute in the model's dtype. Remove it."
            )
        settings |= {"engine": inference.engine, "engine_options": inference}
        settings["num_engines"] = config.roles["actor_infer"].count
        settings["max_context"] = getattr(inference, "max_context", None)
    return settings


def _check(config: RunConfig, training: TrainingConfig) -> None:
    if training.backend != "torch":
        raise ConfigError(f"roll serve supports only training.backend torch, got {training.backend}.")
    if training.optimizer != "adamw":
        raise ConfigError(f"roll serve supports only training.optimizer adamw, got {training.optimizer}.")
    if config.cluster.type == "ray":
        _check_cluster(config, training)
    defaults = LoRAConfig()
    for key, reason in _UNSUPPORTED_LORA_KEYS.items():
        value = getattr(config.model.lora or defaults, key)
        if value != getattr(defaults, key):
            raise ConfigError(f"roll serve does not support model.lora.{key} ({value}): {reason}. Remove it.")


def _check_cluster(config: RunConfig, training: TrainingConfig) -> None:
    """Check that trainer and engines are on this machine, and that the ranks are data-parallel or context-parallel."""
    for name in ("pp", "tp", "ep"):
        if (size := getattr(training.parallel, name)) > 1:
            raise ConfigError(
                f"roll serve does not support training.parallel.{name} ({size}): the adapters of clients can only be "
                "sharded over dp_shard, dp_replicate and cp. Remove it."
            )
    if "actor_infer" not in config.roles:
        raise ConfigError(
            f"roll serve needs engines in cluster.device_mapping.actor_infer, but the pipeline {config.pipeline} has "
            "none: use a pipeline with the section inference, or set cluster.type to local."
        )
    if config.roles["actor_infer"].wider:
        raise ConfigError("roll serve supports engines of one width: set inference.tensor_parallel to one number.")
    cluster = config.cluster
    for key, value in (("num_nodes", cluster.num_nodes > 1), ("address", cluster.address)):
        if value:
            raise ConfigError(
                f"roll serve does not support cluster.{key}: snapshots reach the engines through shared memory, so all "
                "devices must be on this machine. Remove it."
            )
