"""What one step generates, and how evaluation samples."""

from __future__ import annotations

import os

from pydantic import model_validator

from roll.config.agents import AgentConfig
from roll.config.base import FUNCTION, Section, option, path_option
from roll.config.episodes import EpisodesConfig
from roll.config.scheduling import SchedulingConfig

__all__ = ["EvaluationConfig", "RolloutConfig"]

MOST_REWARD_WORKERS = 16
"""Default maximum: a worker takes some 150 MB, and a dozen score mathematics faster than any engine generates it."""


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RolloutConfig(Section):
    """How training data is generated."""

    prompts_per_step: int = option(8, "Prompts drawn for each step.", ge=1)
    group_size: int = option(8, "Rollouts of each prompt.", ge=1)
    max_new_tokens: int = option(512, "Longest answer.", unit="tokens", ge=1)
    temperature: float = option(1.0, "Sampling temperature.", gt=0)
    top_p: float = option(1.0, "Sample among the most likely tokens that hold this probability.", gt=0, le=1)
    top_k: int = option(0, "Sample among this many most likely tokens; 0 means all.", ge=0)
    max_attempts: int = option(
        3,
        "How often a rollout that the infrastructure fails is issued in all, before it is marked `infra_error`.",
        ge=1,
    )
    retry_wait_s: float = option(
        1.0, "Wait before a second attempt; twice as long before each later one, up to a minute.", unit="s", ge=0
    )
    stall_s: float = option(
        600.0, "Warn what a step is waiting for once no rollout has moved for this long.", unit="s", gt=0
    )
    num_reward_workers: int | None = option(
        None,
        "Processes that score answers, each started when it is first needed; by default one for every two processors, "
        "16 at most.",
        ge=1,
    )
    loop: str | None = path_option(
        None,
        "Your own coroutine to make one rollout, instead of ROLL's: `package.module:function`, or "
        "`path/to/file.py:function`. It gets (draw, index, first, generate, renderer) and returns a `Rollout`.",
        examples=["examples/loops/second_try.py:second_try"],
        pattern=FUNCTION,
    )
    agent: AgentConfig | None = option(
        None,
        "An agent program that makes every rollout, instead of ROLL's loop.",
        examples=[{"function": "examples/agents/with_openai.py:agent"}],
    )
    episodes: EpisodesConfig = option(EpisodesConfig(), "How conversations with an environment are held.")
    scheduling: SchedulingConfig = option(SchedulingConfig(), "Order of rollouts, and what a step takes of them.")

    @model_validator(mode="after")
    def _one_loop(self) -> RolloutConfig:
        if self.loop is not None and self.agent is not None:
            raise ValueError("both loop and agent say how a rollout is made: remove one of them")
        return self

    @property
    def reward_workers(self) -> int:
        """Number of processes that score answers on this machine."""
        if self.num_reward_workers is not None:
            return self.num_reward_workers
        return min(max(num_processors() // 2, 1), MOST_REWARD_WORKERS)


class EvaluationConfig(Section):
    """How the policy is evaluated on held-out prompts."""

    every_num_steps: int = option(10, "Evaluate every N steps; 0 means only before and after training.", ge=0)
    num_prompts: int = option(64, "Held-out prompts to use, at most.", ge=1)
    samples_per_prompt: int = option(4, "Answers per prompt.", ge=1)
    temperature: float = option(1.0, "Sampling temperature; 0 means greedy.", ge=0)
    before_training: bool = option(True, "Also evaluate before the first step.")
