"""Checks before a run starts that its engines have the capabilities that it needs."""

from __future__ import annotations

from roll.config.engines import check_engine
from roll.config.rollout_run import RolloutRunConfig

__all__ = ["check_engines"]


def check_engines(config: RolloutRunConfig) -> None:
    """Check the capabilities of the engines of a run and of its judge.

    Raises:
        ConfigError: An engine is unknown or not installed, or lacks a capability; the message names the capability and
            the engines that have it.
    """
    check_engine(config.inference.engine, config.required_engine_capabilities)
    if config.judge is not None:
        check_engine(config.judge.engine, config.judge.required_engine_capabilities, "judge.engine")
