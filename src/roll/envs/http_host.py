"""Environments on a server, one per episode: see `roll.envs.server` for requests and responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.hosting import HostedEnv
from roll.errors import DataError, InfraError
from roll.proxies import describe_proxy, find_proxy
from roll.types import EnvironmentSettings

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpHost"]


class HttpHost:
    """Runs environments on HTTP servers. An unreachable server is an infrastructure failure.

    Requests have no separate timeouts; the timeouts of the episodes apply.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """See `Host`."""
        import aiohttp

        if self._session is None:
            # No limits here: the episodes have their own timeouts, and the scheduler bounds their number.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        env = _RemoteEnv(self, settings.url.rstrip("/"))
        wrappers = [list(pair) for pair in settings.wrappers]
        request = {"environment": settings.name, "options": dict(settings.options), "wrappers": wrappers}
        env.episode = str((await self.request("POST", f"{env.url}/episodes", request))["episode"])
        return env

    async def request(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to a server and return the JSON object of its response.

        Raises:
            DataError: The server rejects the request.
            InfraError: The environment failed on the server, or the server cannot be reached.
        """
        import aiohttp

        assert self._session is not None
        try:
            async with self._session.request(method, url, json=body, proxy=find_proxy(url)) as response:
                reply = await response.json(content_type=None)
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise InfraError(
                f"the response of the server at {url} cannot be read: {what}{describe_proxy(url)}"
            ) from error
        if not isinstance(reply, dict):
            raise InfraError(f"the server at {url} did not return a JSON object")
        if status == 400:
            raise DataError(f"the server at {url} rejected the request: {str(reply.get('error'))[:1000]}")
        if status >= 300:
            raise InfraError(f"the server at {url} returned status {status}: {str(reply.get('error'))[:1000]}")
        return reply

    def end_episode(self, url: str) -> None:
        """Notify a server that an episode is over, without waiting for the response."""
        task = asyncio.ensure_future(self._send_end(url))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _send_end(self, url: str) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self.request("DELETE", url)
        except (InfraError, DataError, TimeoutError):
            pass  # the server closes an idle episode by itself

    async def close(self) -> None:
        """See `Host`."""
        await asyncio.gather(*self._closing)
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _RemoteEnv:
    def __init__(self, host: HttpHost, url: str) -> None:
        self._host, self.url = host, url
        self.episode = ""

    async def reset(self, seed: int | None = None) -> ResetResult:
        reply = await self._host.request("POST", f"{self.url}/episodes/{self.episode}/reset", {"seed": seed})
        return reply.get("observation"), reply.get("info")  # type: ignore[return-value]

    async def step(self, action: str) -> StepResult:
        reply = await self._host.request("POST", f"{self.url}/episodes/{self.episode}/step", {"action": action})
        names = ("observation", "reward", "terminated", "truncated", "info")
        return tuple(reply.get(name) for name in names)  # type: ignore[return-value]

    async def close(self) -> None:
        self._host.end_episode(f"{self.url}/episodes/{self.episode}")
