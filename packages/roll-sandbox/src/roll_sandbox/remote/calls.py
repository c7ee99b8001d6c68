"""Single HTTP requests to a service."""

from __future__ import annotations

import json
from typing import Any

from roll_sandbox.connect_options import load_tls_context, make_token_header, make_unreachable_error, normalize_url
from roll_sandbox.errors import RollSandboxError, SandboxAccessError, SandboxUnavailableError
from roll_sandbox.proxies import make_client_session
from roll_sandbox.wire import error_from_json

__all__ = ["call_service"]

_TIMEOUT_S = 60.0


async def call_service(
    url: str, token: str, method: str, path: str, *, body: dict[str, Any] | None = None, ca_file: str | None = None
) -> Any:
    """Call a route of the service, and return its JSON response; `None` if the response is empty.

    Raises:
        RollSandboxError: the service reports an error, or does not respond.
        ConfigError: the address, token or CA file is invalid.
    """
    import aiohttp

    url, headers, context = normalize_url(url), make_token_header(token), load_tls_context(ca_file)
    try:
        async with (
            make_client_session(
                url,
                headers=headers,
                connector=aiohttp.TCPConnector(ssl=context),
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            ) as session,
            session.request(method, url + path, json=body) as answer,
        ):
            status, text = answer.status, await answer.text()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise make_unreachable_error(url, error) from None
    try:
        content = json.loads(text) if text else None
    except (ValueError, RecursionError):
        content = text
    if status < 400:
        return content
    raise _parse_error(url, status, content)


def _parse_error(url: str, status: int, content: object) -> RollSandboxError:
    if not isinstance(content, dict) or "error" not in content:
        return SandboxUnavailableError(
            f"{url} returned status {status}: check that `roll-sandbox serve` runs at this address."
        )
    if status == 401:
        return SandboxAccessError(f"the sandbox service at {url} rejected the token: {content.get('message')}")
    return error_from_json(content)
