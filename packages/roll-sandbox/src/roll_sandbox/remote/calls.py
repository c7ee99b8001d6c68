"""Single requests to a service, over HTTP."""

from __future__ import annotations

import json
from typing import Any

from roll_sandbox.dialling import checked_url, no_answer, token_header, trusted
from roll_sandbox.errors import RollSandboxError, SandboxAccessError, SandboxUnavailableError
from roll_sandbox.proxies import client_session
from roll_sandbox.wire import failure_of

__all__ = ["call"]

_LIMIT_S = 60.0


async def call(
    url: str, token: str, method: str, path: str, *, body: dict[str, Any] | None = None, ca_file: str | None = None
) -> Any:
    """Call a route, and return its JSON answer; `None` if it is empty.

    Raises:
        RollSandboxError: the service's typed error, or no service answers.
        ConfigError: the address, token or CA file is not usable.
    """
    import aiohttp

    url, headers, context = checked_url(url), token_header(token), trusted(ca_file)
    try:
        async with (
            client_session(
                url,
                headers=headers,
                connector=aiohttp.TCPConnector(ssl=context),
                timeout=aiohttp.ClientTimeout(total=_LIMIT_S),
            ) as session,
            session.request(method, url + path, json=body) as answer,
        ):
            status, text = answer.status, await answer.text()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise no_answer(url, error) from None
    try:
        said = json.loads(text) if text else None
    except (ValueError, RecursionError):
        said = text
    if status < 400:
        return said
    raise _refusal(url, status, said)


def _refusal(url: str, status: int, said: object) -> RollSandboxError:
    if not isinstance(said, dict) or "error" not in said:
        return SandboxUnavailableError(f"{url} answers {status}: is `roll-sandbox serve` there?")
    if status == 401:
        return SandboxAccessError(f"the sandbox service at {url} refuses this token: {said.get('message')}")
    return failure_of(said)
