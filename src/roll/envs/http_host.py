"""Environments on a server, one episode each: see `roll.envs.server` for requests and answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from roll.envs.base import Started, Stepped
from roll.envs.hosting import HostedEnv
from roll.errors import DataError, InfraError
from roll.proxies import proxy_for, proxy_note
from roll.types import EnvironmentSettings

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpHost"]


class HttpHost:
    """See `Host`. Timeouts are those of the episodes; a server that cannot be reached is an infrastructure failure."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """See `Host`."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        env = _Remote(self, settings.url.rstrip("/"))
        wrappers = [list(pair) for pair in settings.wrappers]
        asked = {"environment": settings.name, "options": dict(settings.options), "wrappers": wrappers}
        env.episode = str((await self.ask("POST", f"{env.url}/episodes", asked))["episode"])
        return env

    async def ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to a server and return its answer.

        Raises:
            DataError: The server rejects the request.
            InfraError: The environment failed on the server, or the server cannot be reached.
        """
        import aiohttp

        assert self._session is not None
        try:
            async with self._session.request(method, url, json=body, proxy=proxy_for(url)) as response:
                said = await response.json(content_type=None)
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            what = f"does not answer: {type(error).__name__}: {error}{proxy_note(url)}"
            raise InfraError(f"the server at {url} {what}") from error
        if not isinstance(said, dict):
            raise InfraError(f"the server at {url} answers with no object")
        if status == 400:
            raise DataError(f"the server at {url} refuses: {str(said.get('error'))[:1000]}")
        if status >= 300:
            raise InfraError(f"the server at {url} answers with status {status}: {str(said.get('error'))[:1000]}")
        return said

    def forget(self, url: str) -> None:
        """Notify a server that an episode is over, without waiting for the answer."""
        task = asyncio.ensure_future(self._end(url))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, url: str) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self.ask("DELETE", url)
        except (InfraError, DataError, TimeoutError):
            pass  # the server closes an idle episode by itself

    async def close(self) -> None:
        """See `Host`."""
        await asyncio.gather(*self._closing)
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _Remote:
    def __init__(self, host: HttpHost, url: str) -> None:
        self._host, self.url = host, url
        self.episode = ""

    async def reset(self, seed: int | None = None) -> Started:
        said = await self._host.ask("POST", f"{self.url}/episodes/{self.episode}/reset", {"seed": seed})
        return said.get("observation"), said.get("info")  # type: ignore[return-value]

    async def step(self, action: str) -> Stepped:
        said = await self._host.ask("POST", f"{self.url}/episodes/{self.episode}/step", {"action": action})
        names = ("observation", "reward", "terminated", "truncated", "info")
        return tuple(said.get(name) for name in names)  # type: ignore[return-value]

    async def close(self) -> None:
        self._host.forget(f"{self.url}/episodes/{self.episode}")
