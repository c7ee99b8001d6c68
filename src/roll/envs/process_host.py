"""Environments in the worker pool, each in its own process."""

from __future__ import annotations

from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.hosting import HostedEnv, build
from roll.envs.registration import find
from roll.protocols import ActorHandle, WorkerPool
from roll.types import EnvironmentSettings

__all__ = ["PoolHost"]


class PoolHost:
    """Runs each environment in its own process of the worker pool.

    Args:
        pool: The pool, which is not closed by the host. Its memory limit applies to each environment.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """Start a new instance of the environment in its own process; the class is imported once for all instances."""
        # Environments in one process would share crashes, hangs and leaks. `prepare` runs once, in the process that
        # is forked for each episode, so a start takes milliseconds and imported modules are shared memory.
        return _ProcessEnv(await self._pool.create_actor(build, settings, prepare=(find, (settings.name,))))

    async def close(self) -> None:
        """Do nothing: the owner of the pool closes it."""


class _ProcessEnv:
    def __init__(self, actor: ActorHandle) -> None:
        self._kept = actor

    async def reset(self, seed: int | None = None) -> ResetResult:
        return await self._kept.call("reset", seed)

    async def step(self, action: str) -> StepResult:
        found: Any = await self._kept.call("step", action)
        return found

    async def close(self) -> None:
        await self._kept.close()
