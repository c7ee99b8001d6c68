"""Environments in processes of the worker pool, one each, isolated from each other."""

from __future__ import annotations

from typing import Any

from roll.envs.base import Started, Stepped
from roll.envs.hosting import HostedEnv, build
from roll.envs.registration import find
from roll.protocols import ActorHandle, WorkerPool
from roll.types import EnvironmentSettings

__all__ = ["PoolHost"]


class PoolHost:
    """See `Host`.

    Args:
        pool: The pool, whose memory limit holds for every environment; the owner of the pool closes it.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """See `Host`; the environment's class is imported once, and shared by all instances."""
        return _InProcess(await self._pool.create_actor(build, settings, prepare=(find, (settings.name,))))

    async def close(self) -> None:
        """See `Host`: the pool's owner closes the pool."""


class _InProcess:
    def __init__(self, kept: ActorHandle) -> None:
        self._kept = kept

    async def reset(self, seed: int | None = None) -> Started:
        return await self._kept.call("reset", seed)

    async def step(self, action: str) -> Stepped:
        found: Any = await self._kept.call("step", action)
        return found

    async def close(self) -> None:
        await self._kept.close()
