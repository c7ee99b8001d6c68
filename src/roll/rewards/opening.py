"""The rewards of a run, with the sandboxes and connections that they need, and their end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from roll.config import RLVRConfig
from roll.protocols import WorkerPool
from roll.rewards import build_reward
from roll.rewards.compose import WeightedReward

__all__ = ["open_rewards"]


@asynccontextmanager
async def open_rewards(config: RLVRConfig, pool: WorkerPool) -> AsyncIterator[dict[str, WeightedReward]]:
    """By domain. Sandboxes are started where a reward runs programs, once for all of them.

    Raises:
        UserError: a reward cannot work here: a function, a tool chain, or a way to isolate is missing.
    """
    async with AsyncExitStack() as stack:
        boxes = None
        if any(reward.needs_sandbox for entry in config.data for reward in entry.reward):
            from roll.rewards.code.boxes import CodeBoxes

            boxes = await stack.enter_async_context(CodeBoxes(config.sandbox))
        rewards: dict[str, WeightedReward] = {}
        for entry in config.data:
            rewards[entry.domain or entry.source] = reward = build_reward(entry.reward, pool, boxes)
            stack.push_async_callback(reward.close)
        yield rewards
