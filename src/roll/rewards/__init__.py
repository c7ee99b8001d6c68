"""Verifiers: they score a rollout the moment it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roll.config.rewards import RewardConfig
from roll.protocols import Reward, WorkerPool
from roll.registry import Registry
from roll.rewards.base import Scorer, Verifier

__all__ = ["VERIFIERS", "build_reward"]

VERIFIERS: Registry[Callable[[Any, WorkerPool], Verifier]] = Registry(
    "reward",
    {
        "math": "roll.rewards.math:math_verifier",
        "exact": "roll.rewards.exact:exact_verifier",
        "regex": "roll.rewards.regex:regex_verifier",
        "python": "roll.rewards.python:python_verifier",
        "reasoning_gym": "roll.rewards.reasoning_gym:reasoning_gym_verifier",
    },
)


def build_reward(configs: Sequence[RewardConfig], pool: WorkerPool) -> Reward:
    """One reward from weighted components; its components' names are their `name`, or their type, numbered if needed.

    Raises:
        ConfigError: a user's function cannot be imported.
    """
    names: list[str] = []
    for config in configs:
        base = config.name or config.type
        taken = sum(name.partition("#")[0] == base for name in names)
        names.append(f"{base}#{taken + 1}" if taken else base)
    return Scorer([(n, c, VERIFIERS.get(c.type)(c, pool)) for n, c in zip(names, configs, strict=True)])
