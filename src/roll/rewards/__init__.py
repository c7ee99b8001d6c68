"""Verifiers, which score a rollout as soon as it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from roll.config.rewards import PooledReward, RewardConfig
from roll.protocols import WorkerPool
from roll.registry import Registry
from roll.rewards.base import Judgement, Verifier
from roll.rewards.compose import Component, WeightedReward

if TYPE_CHECKING:
    from roll.rewards.code.sandboxes import CodeSandboxes
    from roll.rewards.judge.engine_judge import JudgeModel

__all__ = ["VERIFIERS", "Judgement", "Verifier", "build_reward"]

VERIFIERS: Registry[Callable[[Any, Any], Verifier]] = Registry(
    "reward",
    {
        "box": "roll.rewards.grounding:build_box_verifier",
        "choice": "roll.rewards.choice:build_choice_verifier",
        "code": "roll.rewards.code.verifier:build_code_verifier",
        "edit_distance": "roll.rewards.edit_distance:build_edit_distance_verifier",
        "format": "roll.rewards.format:build_format_verifier",
        "instructions": "roll.rewards.instructions:build_instructions_verifier",
        "judge": "roll.rewards.judge:build_judge_verifier",
        "length": "roll.rewards.simple:build_length_penalty_verifier",
        "math": "roll.rewards.math:build_math_verifier",
        "point": "roll.rewards.grounding:build_point_verifier",
        "repetition": "roll.rewards.simple:build_repetition_penalty_verifier",
        "short_answer": "roll.rewards.short_answer:build_short_answer_verifier",
        "environment": "roll.rewards.simple:build_environment_verifier",
        "exact": "roll.rewards.simple:build_exact_verifier",
        "regex": "roll.rewards.simple:build_regex_verifier",
        "python": "roll.rewards.python:build_python_verifier",
        "reward_model": "roll.rewards.reward_model:build_reward_model_verifier",
        "remote": "roll.rewards.remote:build_remote_verifier",
        "reasoning_gym": "roll.rewards.reasoning_gym:build_reasoning_gym_verifier",
    },
)


def build_reward(
    configs: Sequence[RewardConfig],
    pool: WorkerPool,
    sandboxes: CodeSandboxes | None = None,
    judge: JudgeModel | None = None,
) -> WeightedReward:
    """Build one reward from weighted components.

    A component without a `name` is named after its type; components with the same name are numbered.

    Args:
        pool: The worker pool that runs the verifiers' functions.
        sandboxes: The sandboxes for components that run programs.
        judge: The run's judge model, for components that use it.

    Raises:
        ConfigError: A user's function cannot be imported or called.
    """
    components: list[Component] = []
    for config in configs:
        name = base = config.name or config.type
        count = 1
        while name in {component.name for component in components}:
            count += 1
            name = f"{base}#{count}"
        runs_in = sandboxes if config.needs_sandbox else judge if config.uses_own_judge else pool
        components.append(Component(name=name, config=config, verifier=_build_verifier(config, runs_in)))
    return WeightedReward(components)


def _build_verifier(config: RewardConfig, runs_in: Any) -> Verifier:
    build = VERIFIERS.get(config.type)
    if not isinstance(config, PooledReward) or config.adaptive_limit is None:
        return build(config, runs_in)
    from roll.rewards.adaptive_pool import AdaptivePool, limit_adaptively

    return limit_adaptively(build(config, AdaptivePool(runs_in)), config.adaptive_limit, config.time_limit_s)
