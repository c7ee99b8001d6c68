"""Generation of training rollouts, and sampling in evaluations."""

from __future__ import annotations

import math
import os

from pydantic import model_validator

from roll.config.agents import AgentConfig
from roll.config.base import FUNCTION_PATTERN, Section, option, path_option
from roll.config.episodes import EpisodesConfig
from roll.config.scheduling import SchedulingConfig

__all__ = ["EvaluationConfig", "RolloutConfig"]

MAX_REWARD_WORKERS = 16
"""Maximum number of reward workers by default: a worker needs about 150 MB, and a dozen suffice for any engine."""


def count_usable_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RolloutConfig(Section):
    """Generation of training rollouts."""

    prompts_per_step: int = option(8, "Number of prompts per step.", ge=1)
    group_size: int = option(8, "Number of rollouts per prompt.", ge=1)
    max_new_tokens: int = option(512, "Maximum length of an answer.", unit="tokens", ge=1)
    temperature: float = option(1.0, "Sampling temperature.", gt=0)
    top_p: float = option(
        1.0,
        "Nucleus sampling: total probability of the most likely tokens to sample from; 1 means all tokens.",
        gt=0,
        le=1,
    )
    top_k: int = option(0, "Top-k sampling: number of the most likely tokens to sample from; 0 means all tokens.", ge=0)
    max_attempts: int = option(
        3,
        "Maximum number of attempts for a rollout with infrastructure errors; then it is marked `infra_error`.",
        ge=1,
    )
    retry_wait_s: float = option(
        1.0, "Wait before the second attempt; it doubles with each further attempt, up to a minute.", unit="s", ge=0
    )
    stall_s: float = option(
        600.0,
        "If no rollout makes progress for this time, a warning reports what the step is waiting for.",
        unit="s",
        gt=0,
    )
    num_reward_workers: int | None = option(
        None,
        "Number of processes that score answers, started on demand. By default one per two CPU cores, but at most 16.",
        ge=1,
    )
    loop: str | None = path_option(
        None,
        "A user-defined coroutine function that generates one rollout, instead of ROLL's loop: "
        "`package.module:function` or `path/to/file.py:function`. It is called with `(draw, index, first_request, "
        "generate, renderer)` and returns a `Rollout`.",
        examples=["examples/loops/second_try.py:second_try"],
        pattern=FUNCTION_PATTERN,
    )
    agent: AgentConfig | None = option(
        None,
        "An agent program that generates every rollout, instead of ROLL's loop.",
        examples=[{"function": "examples/agents/with_openai.py:agent"}],
    )
    episodes: EpisodesConfig = option(EpisodesConfig(), "The model's context in a conversation with an environment.")
    scheduling: SchedulingConfig = option(SchedulingConfig(), "Scheduling of rollouts.")

    @model_validator(mode="after")
    def _check_one_loop(self) -> RolloutConfig:
        if self.loop is not None and self.agent is not None:
            raise ValueError("loop and agent cannot be combined: remove one of them")
        return self

    def count_running_rollouts(self) -> int:
        """Return the number of rollouts that run at once, if the engines have slots for them."""
        scheduling, size = self.scheduling, self.prompts_per_step
        ahead = math.ceil(scheduling.async_ratio * size)
        num_prompts = size + ahead if ahead else scheduling.compute_num_prompts(size)
        return num_prompts * scheduling.compute_num_rollouts(self.group_size)

    @property
    def reward_workers(self) -> int:
        """Number of processes that score answers on this machine."""
        if self.num_reward_workers is not None:
            return self.num_reward_workers
        return min(max(count_usable_cpus() // 2, 1), MAX_REWARD_WORKERS)


class EvaluationConfig(Section):
    """Evaluation of the policy on held-out prompts."""

    every_num_steps: int = option(10, "Evaluate every N steps; 0 means only before and after training.", ge=0)
    num_prompts: int = option(64, "Maximum number of held-out prompts.", ge=1)
    samples_per_prompt: int = option(4, "Number of answers per prompt.", ge=1)
    temperature: float = option(1.0, "Sampling temperature; 0 means greedy.", ge=0)
    before_training: bool = option(True, "Whether to evaluate before the first step as well.")
