"""What one step generates, and how evaluation samples."""

from __future__ import annotations

from roll.config.base import FUNCTION, Section, option
from roll.config.scheduling import SchedulingConfig

__all__ = ["EvaluationConfig", "RolloutConfig"]


class RolloutConfig(Section):
    """Generation of training data."""

    prompts_per_step: int = option(8, "Prompts drawn for each step.", ge=1)
    group_size: int = option(8, "Rollouts of each prompt.", ge=1)
    max_new_tokens: int = option(512, "Longest answer.", unit="tokens", ge=1)
    temperature: float = option(1.0, "Sampling temperature.", gt=0)
    top_p: float = option(1.0, "Sample among the most likely tokens that hold this probability.", gt=0, le=1)
    top_k: int = option(0, "Sample among this many most likely tokens; 0 means all.", ge=0)
    max_attempts: int = option(
        3,
        "How often a rollout that infrastructure failed is issued again before its prompt is given up.",
        ge=1,
    )
    stall_s: float = option(600.0, "Say what a step waits for when no rollout has moved for so long.", unit="s", gt=0)
    num_reward_workers: int = option(1, "Processes that score answers.", ge=1)
    loop: str | None = option(
        None,
        "A coroutine of yours that makes one rollout, in place of ROLL's: `package.module:function`, or "
        "`path/to/file.py:function`. It gets (draw, index, first, generate, renderer) and returns a `Rollout`.",
        examples=["examples/loops/second_try.py:second_try"],
        pattern=FUNCTION,
    )
    scheduling: SchedulingConfig = option(SchedulingConfig(), "Order of rollouts, and what a step takes of them.")


class EvaluationConfig(Section):
    """Measuring the policy on held-out prompts."""

    every_num_steps: int = option(10, "Evaluate after every so many steps; 0 means only before and after.", ge=0)
    num_prompts: int = option(64, "Held-out prompts to use, at most.", ge=1)
    samples_per_prompt: int = option(4, "Answers per prompt.", ge=1)
    temperature: float = option(1.0, "Sampling temperature; 0 means greedy.", ge=0)
    before_training: bool = option(True, "Also evaluate before the first step.")
