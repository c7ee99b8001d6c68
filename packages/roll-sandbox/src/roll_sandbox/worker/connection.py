"""Connects a worker in a separate process to the server, and reconnects it when the connection breaks.

    worker ── join {name, capacity, holds}, unconfirmed ends ──► server ── sandboxes to stop, queued messages ──► worker
           ── beat {report} ──► ◄── beat ──

A restarted server stops the sandboxes that it does not know. After `away_s` without a message from the server, the
worker stops all its sandboxes. The server waits at least as long before it reports a sandbox as lost, so a lost sandbox
has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

import aiohttp

from roll_sandbox.connect_options import load_tls_context, make_token_header, make_unreachable_error, normalize_url
from roll_sandbox.errors import RollSandboxError, SandboxAccessError, SandboxUnavailableError
from roll_sandbox.proxies import make_client_session
from roll_sandbox.wire import Message, Outbox, compute_heartbeat_s, decode, encode, error_from_json, report_to_json
from roll_sandbox.worker.worker import Worker

__all__ = ["WorkerConnection"]

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.05, 0.1, 0.25, 0.5, 1.0)
_AWAY_TIMEOUT_S = 60.0
"""Seconds that either side may be disconnected, until the server sends its own value."""
_MAX_MISSED_HEARTBEATS = 5
_LEAVE_TIMEOUT_S = 2.0
_MAX_UNSENT_BYTES = 2**28
"""Maximum unsent bytes to a server. Beyond it, the worker reconnects, and clients request the output that they missed.
"""


class WorkerConnection:
    """A worker and its connection to a server.

    Args:
        worker: the worker.
        url: address of the server.
        token: token with the scope `worker`.
        name: name of the worker, by which the server recognizes it after a restart.
        capacity: maximum number of concurrent sandboxes.
        memory_bytes: maximum sum of the memory limits of all sandboxes; `None` for no limit.
        ca_file: file of CA certificates to verify the server's certificate; `None` for the system's certificates.
        drain_s: seconds that a draining worker waits for its sandboxes to end.
        leaving: event that starts draining when it is set, like a call to `drain`; by default a new event.

    Raises:
        ConfigError: the address, token or CA file is invalid.
    """

    def __init__(
        self,
        worker: Worker,
        url: str,
        token: str,
        *,
        name: str,
        capacity: int,
        memory_bytes: int | None = None,
        ca_file: str | None = None,
        drain_s: float = 25.0,
        leaving: asyncio.Event | None = None,
    ) -> None:
        self._worker = worker
        self._url = normalize_url(url)
        self._headers = make_token_header(token)
        self._greeting: Message = {"op": "join", "name": name, "capacity": capacity, "memory_bytes": memory_bytes}
        # Distinguishes this process, when it reconnects, from another process with the same name.
        self._greeting["process"] = secrets.token_hex(8)
        self._tls = load_tls_context(ca_file)
        self._drain_s = drain_s
        self._away_s = _AWAY_TIMEOUT_S
        self._last_received = 0.0
        self._welcomed = asyncio.Event()
        self._leaving = leaving or asyncio.Event()
        self._has_left = False
        self._last_warning = ""
        self._outgoing = Outbox(_MAX_UNSENT_BYTES)

    def drain(self) -> None:
        """Stop accepting new sandboxes; `serve` returns when the current sandboxes have ended, or after `drain_s`."""
        self._leaving.set()

    async def serve(self) -> None:
        """Serve until the worker is drained, or this call is canceled.

        Raises:
            SandboxAccessError: the service rejects the token.
        """
        self._last_received = asyncio.get_running_loop().time()
        tasks = [
            asyncio.create_task(each)
            for each in (self._keep_connected(), self._stop_when_server_silent(), self._leave_when_drained())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_connected(self) -> None:
        """Serve one connection after another."""
        connector = aiohttp.TCPConnector(ssl=self._tls)
        async with make_client_session(self._url, headers=self._headers, connector=connector) as session:
            attempt = 0
            while not self._has_left:
                try:
                    socket = await self._connect(session)
                except SandboxUnavailableError as error:
                    self._warn_once(str(error))
                    await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                    attempt += 1
                else:
                    last_received = self._last_received
                    try:
                        await self._serve_connection(socket)
                    except (aiohttp.ClientError, OSError) as error:  # the connection broke at its beginning
                        logger.info("lost the connection to %s: %r", self._url, error)
                    except SandboxAccessError:
                        raise
                    except (RollSandboxError, LookupError, TypeError, ValueError, AttributeError) as error:
                        self._warn_once(f"{self._url} sent an invalid message ({error!r:.200}).")
                    finally:
                        self._worker.set_sender(None)
                        await socket.close()
                    # A server that accepts the connection but sends nothing is treated like one that does not answer.
                    attempt = 0 if self._last_received > last_received else attempt + 1
                    await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])

    async def _stop_when_server_silent(self) -> None:
        """Stop all sandboxes when the server has been silent for `away_s`."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(compute_heartbeat_s(self._away_s))
            if loop.time() - self._last_received > self._away_s:
                await self._worker.close()

    async def _leave_when_drained(self) -> None:
        """Wait until the worker is draining, and then up to `drain_s` until its sandboxes have ended. Then stop the
        remaining sandboxes and leave.
        """
        await self._leaving.wait()
        self._send_heartbeat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while not self._worker.is_empty:
                    await asyncio.sleep(0.05)
        await self._worker.close()
        self._has_left = True
        self._send({"op": "leave"})
        await asyncio.sleep(_LEAVE_TIMEOUT_S)  # time to send the message, since `serve` returns when this task ends

    async def _connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            async with asyncio.timeout(_MAX_MISSED_HEARTBEATS * compute_heartbeat_s(self._away_s)):
                return await session.ws_connect(
                    f"{self._url}/v1/worker", max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=0.5)
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise SandboxAccessError(
                    f"the sandbox service at {self._url} rejected the token ({error.status}): a worker requires a "
                    "token with the scope 'worker' (`roll-sandbox token create OWNER --scope worker`)."
                ) from None
            raise SandboxUnavailableError(
                f"{self._url} returned status {error.status}: check that `roll-sandbox serve` runs at this address."
            ) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise make_unreachable_error(self._url, error) from None

    async def _serve_connection(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Join over a new connection. Serve it until it closes, the server is silent, or too much data is unsent."""
        self._outgoing.clear()
        self._welcomed.clear()
        greeting = {
            **self._greeting,
            "leaving": self._leaving.is_set(),
            "report": report_to_json(self._worker.make_report()),
        }
        await socket.send_bytes(encode({**greeting, "holds": self._worker.list_sandboxes()}))
        self._worker.set_sender(self._send)
        for message in self._worker.list_unacked_ends():
            self._send(message)
        sending, full = self._outgoing.send_over(socket), self._outgoing.is_full.wait()
        tasks = [asyncio.create_task(each) for each in (sending, self._read(socket), self._send_heartbeats(), full)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for received in socket:
            if received.type is not aiohttp.WSMsgType.BINARY:
                continue
            message = decode(received.data)
            if message["op"] == "refused":
                error = error_from_json(message)
                if isinstance(error, SandboxAccessError):
                    raise error
                self._warn_once(f"the sandbox service at {self._url} rejected this worker: {error}")
                return
            self._last_received = asyncio.get_running_loop().time()
            if message["op"] == "welcome":
                self._away_s = _parse_away_s(message["away_s"])
                if self._last_warning:
                    logger.warning("joined the sandbox service at %s.", self._url)
                    self._last_warning = ""
                self._welcomed.set()
            elif "sandbox" in message:
                self._worker.receive(message)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats until the server has not responded to any of the last few heartbeats.

        A stall of this process is not treated as silence of the server.
        """
        with contextlib.suppress(TimeoutError):  # the server's welcome sets the interval
            await asyncio.wait_for(self._welcomed.wait(), compute_heartbeat_s(self._away_s))
        last_received, unanswered = self._last_received, 0
        while unanswered <= _MAX_MISSED_HEARTBEATS:
            await asyncio.sleep(compute_heartbeat_s(self._away_s))
            unanswered = unanswered + 1 if self._last_received == last_received else 0
            last_received = self._last_received
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        self._send(
            {"op": "beat", "leaving": self._leaving.is_set(), "report": report_to_json(self._worker.make_report())}
        )

    def _warn_once(self, message: str) -> None:
        """Log a warning, unless it equals the last logged warning."""
        if message != self._last_warning:
            logger.warning("%s Reconnecting.", message)
            self._last_warning = message

    def _send(self, message: Message) -> None:
        self._outgoing.put(encode(message))


def _parse_away_s(value: object) -> float:
    """Check and return `away_s` of the server's welcome: the seconds for which either side may be disconnected.

    Raises:
        ValueError: the value is not a positive number of seconds.
    """
    if not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"'away_s' of a welcome must be a positive number of seconds, got {value!r:.80}")
    return float(value)
