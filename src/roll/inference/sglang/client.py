"""Sends the calls of one engine to an SGLang server."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import aiohttp

from roll.errors import EngineDiedError, InfraError, ModelError, WeightSyncError
from roll.inference.sglang.launch import Server
from roll.proxies import make_client_session

__all__ = ["CONTROL_TIMEOUT_S", "SGLangClient"]

logger = logging.getLogger(__name__)

READY_POLL_S = 0.2
READY_TIMEOUT_S = 60.0
"""Timeout of one check whether a server is ready; SGLang itself gives up after 20 s."""
START_TIMEOUT_S = 1800.0
"""Time for a server that already runs to become ready; a server that ROLL starts may take any time."""
DEATH_TIMEOUT_S = 5.0
"""Time for a server that does not answer any more to end, so that its last error can be reported."""
CONTROL_TIMEOUT_S = 600.0
"""Timeout of calls other than `/generate`; loading weights from a slow disk takes minutes."""


class SGLangClient:
    """The HTTP client of one engine. Create it on the event loop that uses it.

    Args:
        engine_id: The id of the engine, for messages.
        url: The address of the server.
        server: The process of the server if ROLL started it, otherwise `None`.
    """

    def __init__(self, engine_id: str, url: str, server: Server | None) -> None:
        self.url = url
        self.engine_id = engine_id
        self._server = server
        self._closed = False
        no_limit = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        # SGLang closes an idle connection after 5 s. A request that is sent on it in this moment would look like a dead
        # server, so each request has a connection of its own.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = make_client_session(url, timeout=no_limit, connector=connector)

    async def wait_until_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            ModelError: The server ended, or a server that ROLL did not start is not ready after `START_TIMEOUT_S`.
            EngineDiedError: The client was closed.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        timeout, has_waited = aiohttp.ClientTimeout(total=READY_TIMEOUT_S), False
        while True:
            try:
                if self._server is None:
                    # An earlier run may have ended while the server was paused, and a paused server is never ready.
                    async with self.session.post(f"{self.url}/continue_generation", json={}, timeout=timeout):
                        pass
                async with self.session.get(f"{self.url}/health_generate", timeout=timeout) as response:
                    if response.status == 200:
                        return
                    problem = f"HTTP {response.status}"
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                problem = str(error) or type(error).__name__
            if self._closed:
                raise EngineDiedError(self.engine_id, "it was closed")
            if self._server is None and not has_waited:
                logger.info("engine %s: waits for the SGLang server at %s (%s)", self.engine_id, self.url, problem)
            has_waited = True
            if self._server is None and time.monotonic() > deadline:
                raise ModelError(
                    f"engine '{self.engine_id}': no SGLang server is ready at {self.url} ({problem}): start it, or "
                    "correct inference.options.url."
                )
            if self._server is not None and (cause := self._server.find_cause_of_death()):
                raise ModelError(
                    f"engine '{self.engine_id}': {cause}. If SGLang is not installed there, set "
                    "inference.options.python to the Python of an environment with SGLang."
                )
            await asyncio.sleep(READY_POLL_S)

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a call that must succeed, and return the JSON of its reply.

        Raises:
            InfraError: The call failed or took too long.
            EngineDiedError: The server ended.
        """
        status, reply = await self.post(path, body, CONTROL_TIMEOUT_S)
        if status != 200:
            raise InfraError(f"engine '{self.engine_id}': {path} of SGLang failed (HTTP {status}): {str(reply)[:300]}")
        return reply

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of a reply; text that is not a JSON object becomes `{"message": text}`.

        Raises:
            InfraError: The call took longer than `timeout_s`.
            EngineDiedError: The server ended, or the client was closed.
        """
        if self._closed:
            raise EngineDiedError(self.engine_id, "it was closed")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30.0)
        try:
            async with self.session.post(f"{self.url}{path}", json=body, timeout=timeout) as response:
                return response.status, _parse(await response.read())
        except TimeoutError as error:
            raise InfraError(f"engine '{self.engine_id}': {path} took longer than {timeout_s:g} s.") from error
        except (aiohttp.ClientError, RuntimeError) as error:  # aiohttp raises RuntimeError for a closed session
            cause = await self._wait_for_cause_of_death()
            text = "it was closed" if self._closed else cause or f"{self.url} does not answer ({error})"
            raise EngineDiedError(self.engine_id, text) from error

    async def load(self, path: str, body: dict[str, Any], policy_version: int) -> None:
        """Let the server load weights from files.

        Raises:
            WeightSyncError: The server cannot load them.
            InfraError: The call took too long.
            EngineDiedError: The server ended.
        """
        status, reply = await self.post(path, body, CONTROL_TIMEOUT_S)
        if status != 200 or not reply.get("success"):
            raise WeightSyncError(
                f"engine '{self.engine_id}': SGLang cannot load policy version {policy_version}: "
                f"{reply.get('message') or reply.get('error_message') or reply}"
            )

    async def list_models(self) -> list[str]:
        """Return the names of the served model and of its adapters.

        Raises:
            InfraError: The server does not answer with a list.
        """
        timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
        try:
            async with self.session.get(f"{self.url}/v1/models", timeout=timeout) as response:
                return [str(model["id"]) for model in _parse(await response.read())["data"]]
        except (aiohttp.ClientError, TimeoutError, RuntimeError, KeyError, TypeError) as error:
            raise InfraError(
                f"engine '{self.engine_id}': {self.url}/v1/models cannot be read ({type(error).__name__}: {error})."
            ) from error

    async def close(self) -> None:
        """Close all connections, and end the server if ROLL started it; running calls raise `EngineDiedError`."""
        self._closed = True
        try:
            await self.session.close()
            if self._server is not None:
                await asyncio.to_thread(self._server.close)
        finally:
            if self._server is not None:
                self._server.kill()

    async def _wait_for_cause_of_death(self) -> str:
        """Return why the server ended; empty if it does not end. Its connections end a moment before its process."""
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while self._server is not None and not self._closed:
            if (cause := self._server.find_cause_of_death()) or time.monotonic() > deadline:
                return cause
            await asyncio.sleep(READY_POLL_S)
        return ""


def _parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a reply; anything else becomes `{"message": text}`."""
    try:
        reply = json.loads(body)
    except ValueError:
        reply = None
    return reply if isinstance(reply, dict) else {"message": body[:1000].decode(errors="replace")}
