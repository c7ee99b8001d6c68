"""Where environments run, as a loop of episodes sees it: here, on the event loop."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from roll.envs.base import make
from roll.envs.timing import acting
from roll.errors import InfraError, UserError
from roll.types import EnvironmentSettings

__all__ = ["EnvHosts", "HostedEnv"]


class HostedEnv(Protocol):
    """One episode's environment, wherever it runs; what goes wrong in it is an `InfraError`."""

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """First observation, information."""
        ...

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, information."""
        ...

    async def close(self) -> None:
        """Let go of it."""
        ...


class EnvHosts:
    """Opens environments where their settings say."""

    @asynccontextmanager
    async def open(self, settings: EnvironmentSettings) -> AsyncIterator[HostedEnv]:
        """An environment of one's own, closed however the episode ends."""
        env = _InLoop(settings.name, make(settings.name, settings.options))
        try:
            yield env
        finally:
            await env.close()


@dataclass(frozen=True, eq=False)
class _InLoop:
    name: str
    env: Any

    async def reset(self, seed: int | None = None) -> Any:
        return await self._act(self.env.reset, seed)

    async def step(self, action: str) -> Any:
        return await self._act(self.env.step, action)

    async def close(self) -> None:
        if hasattr(self.env, "close"):
            await self._act(self.env.close)

    async def _act(self, call: Any, *arguments: object) -> Any:
        try:
            with acting():
                found: Any | Awaitable[Any] = call(*arguments)
                return await found if inspect.isawaitable(found) else found
        except (InfraError, UserError):
            raise
        except Exception as error:
            raise InfraError(f"environment '{self.name}' failed: {type(error).__name__}: {error}") from error
