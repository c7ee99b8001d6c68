"""The `remote` runtime: a service runs the sandboxes; the WebSocket to the service is reopened when it breaks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time

import aiohttp

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.connect_options import load_tls_context, make_token_header, make_unreachable_error, normalize_url
from roll_sandbox.errors import (
    OversizedUploadError,
    RollSandboxError,
    SandboxAccessError,
    SandboxError,
    SandboxLostError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxUnavailableError,
    UnknownImageError,
)
from roll_sandbox.proxies import make_client_session
from roll_sandbox.remote.connection import RemoteSandbox, ServiceConnection
from roll_sandbox.types import Mount, SandboxSpec
from roll_sandbox.uploads import Files, compute_digest, format_upload_source, read_directory
from roll_sandbox.wire import MAX_MESSAGE_BYTES, Message, Outbox, decode, encode, error_from_json

__all__ = ["RemoteRuntime"]

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.05, 0.1, 0.25, 0.5, 1.0)
_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
_WORKER_REJOIN_S = 10.0
"""Seconds that workers have to reconnect after a restart of the service."""


class RemoteRuntime:
    """The runtime whose sandboxes run in a service; see `runtime.Runtime`.

    Args:
        url, token, lifetime_s, ca_file, reconnect_timeout_s, wait_for_quota: see `connect`.

    Raises:
        ConfigError: see `connect`.
    """

    name = "service"
    fresh_programs = True

    def __init__(
        self,
        url: str,
        token: str,
        *,
        lifetime_s: float | None = None,
        ca_file: str | None = None,
        reconnect_timeout_s: float = 30.0,
        wait_for_quota: bool = False,
    ) -> None:
        self._url = normalize_url(url)
        self._headers = make_token_header(token)
        self._lifetime_s = lifetime_s
        self._tls = load_tls_context(ca_file)
        self._reconnect_timeout_s = reconnect_timeout_s
        self._wait_for_quota = wait_for_quota
        self._access_error: SandboxAccessError | None = None
        """The error after which the runtime does not connect again."""
        self._reconnected_at = -math.inf
        """Time of the last reconnection."""
        self._num_waiting_for_quota = 0
        """Number of requests that wait for the owner's quota."""
        self._service = ServiceConnection(self._transmit)
        self._session: aiohttp.ClientSession | None = None
        self._connection_task: asyncio.Task[None] | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._outgoing = Outbox()
        self._uploads: dict[str, Mount] = {}
        """Mounts of uploaded directories, by local path."""
        self._files: dict[str, Files] = {}
        """Files of uploaded directories, by digest."""
        self._closed = False
        self._max_message_bytes = MAX_MESSAGE_BYTES

    async def start(self) -> None:
        """Connect to the service.

        Raises:
            SandboxUnavailableError: no service answers.
            SandboxAccessError: the service rejects the token.
        """
        if self._session is not None:
            return
        self._session = make_client_session(
            self._url, headers=self._headers, connector=aiohttp.TCPConnector(ssl=self._tls)
        )
        try:
            socket = await self._connect()
        except BaseException:
            await self.close()
            raise
        self._closed = False
        self._reupload()
        self._connection_task = asyncio.create_task(self._keep_connected(socket))

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        """Open a new connection, and receive the service's greeting."""
        assert self._session is not None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                # 0 turns off aiohttp's limit of 4 MiB, since the service bounds its messages.
                socket = await self._session.ws_connect(f"{self._url}/v1/line", max_msg_size=0, heartbeat=20.0)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403) and not await self._is_rate_limited():
                problem = (
                    "the token is invalid, expired or revoked"
                    if error.status == 401
                    else "the token lacks the scope 'run'"
                )
                raise SandboxAccessError(
                    f"the sandbox service at {self._url} rejected the token ({error.status}): {problem}. "
                    "`roll-sandbox token create` creates a new one."
                ) from None
            raise SandboxUnavailableError(
                f"{self._url} returned status {error.status}: check that `roll-sandbox serve` runs at this address."
            ) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise make_unreachable_error(self._url, error) from None
        try:
            greeting = decode(await socket.receive_bytes(timeout=_CLOSE_TIMEOUT_S))
            self._max_message_bytes = int(greeting.get("max_message_bytes", MAX_MESSAGE_BYTES))
        except (TypeError, ValueError, TimeoutError, aiohttp.ClientError, SandboxRequestError) as error:
            await socket.close()
            raise SandboxUnavailableError(
                f"{self._url} is not a sandbox service: it sent no valid greeting "
                f"({str(error) or type(error).__name__})."
            ) from None
        self.fresh_programs = bool(greeting.get("fresh_programs", True))
        return socket

    async def _is_rate_limited(self) -> bool:
        """Return whether the service may have rejected a WebSocket because of too many requests, not because of the
        token.
        """
        assert self._session is not None
        try:
            async with self._session.get(f"{self._url}/health/ready") as answer:
                return answer.status == 429
        except (aiohttp.ClientError, OSError, TimeoutError):
            return True  # the token may be valid

    async def _keep_connected(self, socket: aiohttp.ClientWebSocketResponse | None) -> None:
        """Serve one connection after another, as long as reconnecting succeeds in time."""
        try:
            await self._serve(socket)
        except Exception as error:
            logger.exception("the connection to the sandbox service at %s failed", self._url)
            self._service.fail_all(
                SandboxError(f"the connection to the sandbox service failed and cannot be reopened: {error!r}")
            )

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse | None) -> None:
        while socket is not None:
            self._socket = socket
            writing = asyncio.create_task(self._write(socket))
            try:
                await self._read(socket)
            finally:
                self._socket = None
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                await socket.close()
            # `resend` sends all messages that are still needed; messages left in the queue would be sent twice.
            self._outgoing.clear()
            if self._closed:
                return
            socket = await self._reconnect()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for received in socket:
            if received.type is aiohttp.WSMsgType.BINARY:
                try:
                    message = decode(received.data)
                    if message["op"] == "refused":
                        self._service.fail_all(error_from_json(message))
                    else:
                        self._service.receive(message)
                except (RollSandboxError, LookupError, TypeError, ValueError, AttributeError) as error:
                    self._service.fail_all(SandboxLostError(f"{self._url} sent an invalid message ({error!r:.200})"))

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self._outgoing.send_over(socket)
        await socket.close()  # ends `_read` as well

    async def _reconnect(self) -> aiohttp.ClientWebSocketResponse | None:
        """Reconnect and resend messages of running programs; return `None` after `close`, or for a rejected token."""
        began = time.monotonic()
        until = began + self._reconnect_timeout_s
        attempt = 0
        while not self._closed:
            try:
                socket = await self._connect()
            except SandboxUnavailableError as error:
                if attempt == len(_BACKOFF_S):
                    logger.warning(
                        "%s Reconnecting. After %g s without a connection, running programs are lost.",
                        error,
                        self._reconnect_timeout_s,
                    )
                if time.monotonic() > until:
                    self._service.fail_all(SandboxLostError(f"the sandbox service is unreachable: {error}"))
                    until = time.monotonic() + self._reconnect_timeout_s
            except SandboxAccessError as error:
                self._access_error = error
                self._service.fail_all(error)
                return None
            else:
                if attempt > len(_BACKOFF_S):
                    away_s = time.monotonic() - began
                    logger.warning("reconnected to the sandbox service at %s after %.0f s.", self._url, away_s)
                self._reconnected_at = time.monotonic()
                # Uploads first, since sandboxes whose `create` is resent may mount the directories.
                self._reupload()
                self._service.resend()
                return socket
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1
        return None

    def _transmit(self, message: Message) -> None:
        data = encode(message)
        if len(data) > self._max_message_bytes:
            raise OversizedUploadError(
                f"the total size of a program, its files and its input must not exceed {self._max_message_bytes:,} "
                f"bytes, got {len(data):,}: send less, or increase `--max-message-bytes` of the service."
            )
        self._outgoing.put(data)

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Upload the directories of mounts with `upload` set, and return the spec with mounts of these uploads.

        The image's name stays unchanged, because the worker resolves it.

        Raises:
            OversizedUploadError: a directory is too large to upload.
        """
        if not any(mount.upload for mount in spec.mounts):
            return spec
        mounts = [self._upload_mount(mount) if mount.upload else mount for mount in spec.mounts]
        return dataclasses.replace(spec, mounts=tuple(mounts))

    def _upload_mount(self, mount: Mount) -> Mount:
        """Upload a mount's directory if this has not been done yet; return the mount with the upload as its source."""
        uploaded = self._uploads.get(mount.source)
        if uploaded is None:
            files = read_directory(mount.source)
            digest = compute_digest(files)
            self._upload(digest, files)
            self._files[digest] = files
            uploaded = self._uploads[mount.source] = Mount(source=format_upload_source(digest), target=mount.target)
        return dataclasses.replace(uploaded, target=mount.target)

    def _reupload(self) -> None:
        """Upload all directories again over a new connection, since the service may have been restarted."""
        for digest, files in self._files.items():
            self._upload(digest, files)

    def _upload(self, digest: str, files: Files) -> None:
        self._transmit({"op": "upload", "sandbox": digest, "files": files})

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox. Retry while workers reconnect and, if `wait_for_quota`, while the quota is used up."""
        until = time.monotonic() + self._reconnect_timeout_s
        while True:
            if self._access_error is not None:
                raise SandboxAccessError(str(self._access_error))
            if self._connection_task is None or self._connection_task.done():
                raise SandboxError("the connection to the sandbox service was not opened, or is closed")
            try:
                return await self._service.create(spec, lifetime_s=self._lifetime_s)
            except UnknownImageError:  # a SandboxUnavailableError, but waiting does not help
                raise
            except SandboxUnavailableError:
                if time.monotonic() > self._reconnected_at + _WORKER_REJOIN_S:
                    raise
                await asyncio.sleep(_BACKOFF_S[1])
                continue
            except SandboxQuotaError as error:
                if not self._wait_for_quota or time.monotonic() > until:
                    raise
                if not self._num_waiting_for_quota:
                    logger.warning("%s Retrying for %g s.", error, self._reconnect_timeout_s)
            self._num_waiting_for_quota += 1
            try:
                await asyncio.sleep(_BACKOFF_S[-1])
            finally:
                self._num_waiting_for_quota -= 1

    async def create(self, spec: SandboxSpec, *, lifetime_s: float | None = None) -> RemoteSandbox:
        """Create a sandbox; see `ServiceConnection.create`."""
        return await self._service.create(self.resolve(spec), lifetime_s=lifetime_s)

    async def attach(self, name: str, spec: SandboxSpec) -> RemoteSandbox:
        """Return an existing sandbox of this owner.

        Raises:
            UnknownSandboxError: the owner has no such sandbox.
        """
        return await self._service.attach(name, spec)

    async def inspect(self, name: str, *, output_bytes: int = 0) -> Message:
        """Return a sandbox's usage and programs; see `ServiceConnection.inspect`."""
        return await self._service.inspect(name, output_bytes=output_bytes)

    async def close(self) -> None:
        """End every sandbox of this connection, and close the connection."""
        if self._connection_task is not None and not self._connection_task.done():
            connections = self._service.open_connections
            for connection in connections:
                self._service.stop(connection)
            if connections:
                await asyncio.wait([connection.ended for connection in connections], timeout=_CLOSE_TIMEOUT_S)
        self._closed = True
        if self._socket is not None:
            await self._socket.close()
        if self._connection_task is not None:
            self._connection_task.cancel()
            await asyncio.gather(self._connection_task, return_exceptions=True)
            self._connection_task = None
        self._service.fail_all(SandboxError("the connection to the sandbox service is closed"))
        if self._session is not None:
            await self._session.close()
            self._session = None
