"""One HTTP endpoint of a judge or a reward service: sends requests, and decides which failures are retryable.

    post ──► 200: the body
              ├─ connection, timeout, 408/409/425/429/5xx: `RequestFailure`, which is retryable
              └─ any other status: `RejectedRequestError`

Invariants: the key is only in a header, never in a message, log or configuration; the size of a reply is limited.
"""

from __future__ import annotations

import os
from email.utils import parsedate_to_datetime
from time import time

import aiohttp

from roll.errors import ConfigError
from roll.proxies import describe_proxy, make_client_session
from roll.tracking.escape import escape_controls

__all__ = ["MAX_WAIT_S", "Endpoint", "RejectedRequestError", "RequestFailure", "compute_wait_s", "read_api_key"]

MAX_WAIT_S = 60.0
"""Maximum wait before a retry."""
MAX_REPLY_BYTES = 2**20
MAX_REASON_BYTES = 2**16
_RETRIED_STATUSES = {408, 409, 425, 429}


class RequestFailure(Exception):
    """A request failed, and a retry may succeed."""

    def __init__(self, cause: str, wait_s: float = 0.0, *, has_reply: bool = True) -> None:
        super().__init__(cause)
        self.cause = cause
        self.wait_s = wait_s
        """Seconds to wait that the server requires (`Retry-After`)."""
        self.has_reply = has_reply
        """False if the server could not be reached, or did not reply."""


class RejectedRequestError(Exception):
    """The server rejected a request, and a retry cannot succeed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        """The status and the beginning of the body."""


class Endpoint:
    """Sends JSON to the paths of one base URL.

    Args:
        url: The base URL.
        key: The bearer token; empty for requests without a token.
        time_limit_s: Time limit of one request.
        follow_redirects: Whether to follow redirects; otherwise a redirect raises a `RejectedRequestError`.
    """

    def __init__(self, url: str, *, key: str, time_limit_s: float, follow_redirects: bool) -> None:
        self.url = url
        self._key = key
        self._time_limit_s = time_limit_s
        self._follow_redirects = follow_redirects
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes) -> bytes:
        """Send one request, and return the body of its reply.

        Args:
            path: The path below the base URL.
            body: The JSON to send.

        Raises:
            RequestFailure: A retry may succeed.
            RejectedRequestError: A retry cannot succeed.
            ConfigError: The environment configures a proxy of an unsupported type.
        """
        if self._session is None:
            # A limit of 0 means no limit: the caller bounds the number of requests.
            self._session = make_client_session(self.url, connector=aiohttp.TCPConnector(limit=0))
        url = f"{self.url}{path}"
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limit = aiohttp.ClientTimeout(total=self._time_limit_s)
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=limit, allow_redirects=self._follow_redirects
            ) as response:
                raw = await _read_body(response)
                status, wait_s = response.status, _parse_retry_after(response.headers.get("Retry-After", ""))
        except TimeoutError:
            # Unlike a verifier's timeout, this is not the fault of the answer, and never becomes a reward of 0.
            raise RequestFailure(f"no response within {self._time_limit_s:g} s", has_reply=False) from None
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{type(error).__name__}: {error}".strip(": ") + describe_proxy(url)
            raise RequestFailure(self._redact_key(cause), has_reply=False) from None
        if status == 200:
            return raw
        # The key is removed first, because it could be cut or contain the characters that are replaced.
        text = self._redact_key(raw[:MAX_REASON_BYTES].decode(errors="replace"))[:300]
        reason = f"status {status}: {escape_controls(' '.join(text.split()))}"
        if status in _RETRIED_STATUSES or status >= 500:
            wait_note = f" (Retry-After: {wait_s:.0f} s)" if wait_s > MAX_WAIT_S else ""
            raise RequestFailure(reason + wait_note, wait_s)
        raise RejectedRequestError(status, reason)

    def _redact_key(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text

    async def close(self) -> None:
        """Close connections. Calling it twice is safe."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def compute_wait_s(failures: int, backoff_s: float, jitter: float, required_s: float) -> float:
    """Return the seconds to wait before a retry, at most `MAX_WAIT_S`.

    Args:
        failures: Number of failed requests so far, at least 1.
        backoff_s: Maximum wait after the first failure; it doubles with each further failure.
        jitter: A random number between 0 and 1.
        required_s: Minimum wait that the server requires.
    """
    # Full jitter: when a server fails, many requests fail at once and must not return at once.
    longest = min(MAX_WAIT_S, backoff_s * 2 ** min(failures - 1, 30))
    return max(jitter * longest, min(required_s, MAX_WAIT_S))


def read_api_key(variable: str | None, service: str) -> str:
    """Return the API key from an environment variable; an empty string if no variable is configured.

    Args:
        variable: The name of the variable.
        service: Name of the service in messages.

    Raises:
        ConfigError: The variable is not set, or its value cannot be sent in a header.
    """
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {variable}, which must contain the key of {service}, is not set: set it, or "
            "remove `api_key_env`."
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the environment variable {variable}, which must contain the key of {service}, contains characters that "
            "cannot be sent in an HTTP header: set it to printable ASCII text."
        )
    return key


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read the body, up to a limit that is far above the size of any valid reply."""
    raw = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        raw += chunk
        if len(raw) > MAX_REPLY_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {MAX_REPLY_BYTES:,} bytes")
    return bytes(raw)


def _parse_retry_after(header: str) -> float:
    """Return the seconds to wait from a `Retry-After` header, which is a number or a date."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
