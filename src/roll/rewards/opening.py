"""Open and close a run's rewards, with the sandboxes and connections that they need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from roll.config.data import DataConfig
from roll.config.rewards import RewardConfig
from roll.config.sandbox import SandboxConfig
from roll.protocols import WorkerPool
from roll.rewards import build_reward
from roll.rewards.compose import WeightedReward

if TYPE_CHECKING:
    from roll.rewards.judge.engine_judge import JudgeModel

__all__ = ["open_reward_lists", "open_rewards"]


def open_rewards(
    data: Sequence[DataConfig], sandbox: SandboxConfig, pool: WorkerPool, judge: JudgeModel | None = None
) -> AbstractAsyncContextManager[dict[str, WeightedReward]]:
    """Open the rewards of a run, by domain: see `open_reward_lists`."""
    lists = {entry.domain or entry.source: entry.reward for entry in data}
    return open_reward_lists(lists, sandbox, pool, judge)


@asynccontextmanager
async def open_reward_lists(
    rewards_by_name: Mapping[str, Sequence[RewardConfig]],
    sandbox: SandboxConfig,
    pool: WorkerPool,
    judge: JudgeModel | None = None,
) -> AsyncIterator[dict[str, WeightedReward]]:
    """Open rewards and yield them by domain; if a reward runs programs, sandboxes are started once for all rewards.

    Raises:
        UserError: A reward cannot work on this machine: a function, a tool chain, or a sandbox runtime is missing.
    """
    async with AsyncExitStack() as stack:
        sandboxes = None
        if any(reward.needs_sandbox for rewards in rewards_by_name.values() for reward in rewards):
            from roll.rewards.code.sandboxes import CodeSandboxes

            sandboxes = await stack.enter_async_context(CodeSandboxes(sandbox))
        opened: dict[str, WeightedReward] = {}
        for domain, rewards in rewards_by_name.items():
            opened[domain] = reward = build_reward(rewards, pool, sandboxes, judge)
            stack.push_async_callback(reward.close)
        yield opened
