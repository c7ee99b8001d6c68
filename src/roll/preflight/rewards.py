"""Trying a run's rewards before it starts: does the right answer score higher than a wrong one?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError, InfraError
from roll.preflight.report import RewardTrial
from roll.rewards.opening import open_reward_lists
from roll.types import Prompt, Rollout

__all__ = ["try_rewards"]


async def try_rewards(sandbox: SandboxConfig, prompts: Sequence[tuple[DataConfig, Prompt]]) -> list[RewardTrial]:
    """Score a right and a wrong answer to each prompt, in a worker process as a run does.

    Args:
        sandbox: where programs run.
        prompts: one of each domain, with the source that it comes from.

    Raises:
        ConfigError: a reward cannot score at all.
        UserError: a reward cannot be opened.
    """
    trials: list[RewardTrial] = []
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(1)
        stack.push_async_callback(pool.close)
        lists = {prompt.domain: entry.reward for entry, prompt in prompts}
        rewards = await stack.enter_async_context(open_reward_lists(lists, sandbox, pool))
        for entry, prompt in prompts:
            reward = rewards[prompt.domain]
            right, wrong = _answers(entry, prompt)
            try:
                values = [(await reward(_rollout(prompt, text))).value for text in (right, wrong)]
            except InfraError as error:
                raise ConfigError(f"the reward of '{prompt.domain}' does not work: {error}") from None
            if not prompt.answer and any(reward.needs_sandbox for reward in entry.reward):
                continue  # programs have run; there is none that is known to be right
            trials.append(
                RewardTrial(
                    domain=prompt.domain, right=right, right_value=values[0], wrong=wrong, wrong_value=values[1]
                )
            )
    return trials


def _answers(entry: DataConfig, prompt: Prompt) -> tuple[str, str]:
    """The reference answer, in a box where the reward looks for one, and an answer that is certainly wrong."""
    answer = prompt.answer
    wrong = str(int(answer) + 1) if answer.lstrip("-").isdecimal() else "no idea"
    boxed = any(getattr(config, "extract", "") == "boxed" for config in entry.reward)
    return (f"\\boxed{{{answer}}}", f"\\boxed{{{wrong}}}") if boxed else (answer, wrong)


def _rollout(prompt: Prompt, text: str) -> Rollout:
    nothing = np.zeros(0, np.int32)
    return Rollout(
        draw_id=0,
        index=0,
        prompt=prompt,
        prompt_token_ids=nothing,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        policy_versions=nothing,
        finish_reason="stop",
        text=text,
    )
