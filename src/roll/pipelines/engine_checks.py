"""Checks before a run starts that its engines have the capabilities that it needs."""

from __future__ import annotations

from roll.config.engines import check_engine, check_engine_options, check_lora_rank, get_engine_capabilities
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError

__all__ = ["check_engines", "check_heads"]


def check_engines(config: RolloutRunConfig) -> None:
    """Check the capabilities of the engines of a run and of its judge.

    Raises:
        ConfigError: An engine is unknown or not installed, or lacks a capability; the message names the capability and
            the engines that have it. An option of the engine or the rank of the adapters is not supported, or several
            engines would use the same server.
    """
    check_engine(config.inference.engine, config.required_engine_capabilities, config.name_key("inference.engine"))
    check_engine_options(config.inference.engine, config.inference.options)
    _check_address(config)
    if config.synced_adapter is not None:
        rank, alternative = config.synced_adapter.max_rank, "set weight_sync.lora to merged"
        check_lora_rank(config.inference.engine, rank, "the largest rank of model.lora", alternative)
    if config.judge is not None:
        check_engine(config.judge.engine, config.judge.required_engine_capabilities, "judge.engine")


def check_heads(config: RolloutRunConfig, num_heads: int) -> None:
    """Check that the devices of an engine divide the attention heads of the model, for every width.

    Raises:
        ConfigError: A width does not divide the number of heads.
    """
    for width in config.inference.widths:
        if num_heads % width:
            raise ConfigError(
                f"inference.tensor_parallel {config.inference.tensor_parallel}: {width} devices do not divide the "
                f"{num_heads} attention heads of the model: use a divisor of {num_heads}."
            )


def _check_address(config: RolloutRunConfig) -> None:
    """Check that a server that already runs serves only one engine, because each engine replaces its weights."""
    option = get_engine_capabilities(config.inference.engine).address_option
    address = config.inference.options.get(option) if option else None
    if not address or (config.num_engines == 1 and config.cluster.elastic is None):
        return
    several = f"has {config.num_engines} engines" if config.num_engines > 1 else "has cluster.elastic"
    raise ConfigError(
        f"inference.options.{option} {address} is one server, but the run {several}: map one engine "
        f"(cluster.device_mapping.actor_infer) and remove cluster.elastic, or remove inference.options.{option}, so "
        "that ROLL starts a server for each engine."
    )
