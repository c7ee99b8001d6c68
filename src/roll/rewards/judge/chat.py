"""Send requests to a judge model behind an endpoint.

    generate_reply ──► free slot (max_concurrent) ──► POST ──► 200: its text
                                              ├─ connection, timeout, 408/409/425/429/5xx: wait (with jitter), retry
                                              ├─ 401/403/404: the user must correct the address, the key or the name
                                              └─ any other: this request cannot be answered

Invariants: at most `max_concurrent` requests run; a request that waits for a retry uses no slot.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from roll.config.rewards import JudgeReward
from roll.errors import ConfigError, RewardInfraError
from roll.rewards.endpoint import (
    MAX_WAIT_S,
    Endpoint,
    RejectedRequestError,
    RequestFailure,
    compute_wait_s,
    read_api_key,
)
from roll.types import Message

__all__ = ["Chat", "EndpointChat"]

logger = logging.getLogger(__name__)

_TRUNCATED_REASONS = frozenset(
    (
        *("length", "max_tokens", "max_output_tokens", "max_length", "model_length", "token_limit", "error_limit"),
        *("context_length", "context_length_exceeded", "model_context_window_exceeded", "incomplete"),
    )
)
"""Finish reasons, in lower case, of a truncated reply, as the servers of different vendors write them."""
_FILTERED_REASONS = frozenset(
    (
        *("content_filter", "content_filtered", "safety", "refusal", "recitation", "blocklist", "prohibited_content"),
        *("spii", "language", "image_safety", "guardrail_intervened", "sensitive", "error_toxic"),
    )
)
"""Finish reasons of a refusal, or of a filter that ended the reply."""
_FAILED_REASONS = frozenset(
    (
        *("error", "abort", "cancelled", "timeout", "network_error", "insufficient_system_resource", "other"),
        *("malformed_response", "malformed_function_call", "unexpected_tool_call"),
    )
)
"""Finish reasons of a server that failed during a reply."""
_USER_ERRORS = {
    401: "the key is not accepted",
    403: "the key lacks the permission",
    404: "the address or the model does not exist",
}


class Chat(Protocol):
    """Interface of a judge model: behind an endpoint, or on engines of this run."""

    name: str
    """Name for messages."""
    identity: list[Any]
    """Plain data that determines replies, in addition to the request; part of the cache key."""

    async def generate_reply(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        """Request a JSON reply that follows the schema, and return its text.

        Raises:
            RewardInfraError: The request failed.
            ConfigError: The user must correct a setting.
        """
        ...

    async def close(self) -> None:
        """Close connections. Calling it twice is safe."""
        ...


class EndpointChat:
    """An OpenAI-compatible endpoint; implements `Chat`.

    Args:
        config: The address and the settings of requests.
        sleep: Waits between attempts.
        jitter: Returns a random number between 0 and 1, for each wait.

    Raises:
        ConfigError: The environment variable for the API key is not set.
    """

    def __init__(
        self,
        config: JudgeReward,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.name = str(config.model)
        self.identity: list[Any] = [config.url, config.model, config.options]
        self._config = config
        self._sleep, self._jitter = sleep, jitter
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._endpoint = Endpoint(
            str(config.url),
            key=read_api_key(config.api_key_env, f"the judge at {config.url}"),
            time_limit_s=config.time_limit_s,
            follow_redirects=True,
        )
        self._logged_long_wait = False

    async def generate_reply(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        body = json.dumps(self._make_body(messages, schema)).encode()
        failure = RequestFailure("")
        for attempt in range(self._config.max_attempts):
            if attempt:
                await self._sleep(compute_wait_s(attempt, self._config.backoff_s, self._jitter(), failure.wait_s))
            try:
                async with self._slots:
                    return await self._post(body)
            except RequestFailure as error:
                failure = error
            self._log_long_wait(failure, self._config.max_attempts - 1 - attempt)
        times = f"{self._config.max_attempts} consecutive times" if self._config.max_attempts > 1 else "once"
        raise RewardInfraError(f"the judge at {self._config.url} failed {times}; the last error: {failure.cause}")

    def _log_long_wait(self, failure: RequestFailure, num_left: int) -> None:
        """Log a warning, only once, that the server requires a longer wait than the settings allow."""
        if failure.wait_s <= MAX_WAIT_S or self._logged_long_wait:
            return
        self._logged_long_wait = True
        logger.warning(
            "The judge at %s requires a wait of %.0f s (Retry-After) after %s. ROLL retries after at most %.0f s, %d "
            "more times; then the rollout fails with an infrastructure error. If the quota is used up, stop the "
            "run.",
            self._config.url,
            failure.wait_s,
            failure.cause,
            MAX_WAIT_S,
            num_left,
        )

    def _make_body(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [message.to_dict() for message in messages],
            "temperature": config.temperature,
            "max_tokens": config.max_reply_tokens,
        }
        if config.structured == "json_schema":
            named = {"name": "verdict", "schema": dict(schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif config.structured == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body | config.options

    async def _post(self, body: bytes) -> str:
        """Send one request, and return the text of its reply; raise a `RequestFailure` that a retry may resolve."""
        config = self._config
        try:
            return _parse_completion(await self._endpoint.post("/chat/completions", body))
        except RejectedRequestError as error:
            status, reason = error.status, error.reason
        if status in _USER_ERRORS:
            raise ConfigError(
                f"the judge at {config.url} rejected requests for the model '{config.model}': {_USER_ERRORS[status]} "
                f"({reason}). Check `url`, `model` and `api_key_env` of the reward 'judge'."
            )
        hint = "" if config.structured == "none" else "; if it does not support response_format, set `structured: none`"
        raise RewardInfraError(f"the judge at {config.url} rejected this request: {reason}{hint}")

    async def close(self) -> None:
        await self._endpoint.close()


def _parse_completion(raw: bytes) -> str:
    """Return the message's text in a chat completion; raise a `RequestFailure` if the reply is incomplete."""
    try:
        choice = json.loads(raw)["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, thought = (
            _join_parts(message.get("content")),
            message.get("reasoning_content") or message.get("reasoning"),
        )
        refusal = message.get("refusal")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise RequestFailure(f"its reply is not a chat completion: {raw[:100]!r}") from None
    if (why := _describe_incomplete(reason)) is not None:
        raise RequestFailure(why)
    if text.strip():
        return text
    if isinstance(refusal, str) and refusal.strip():
        raise RequestFailure(f"it refuses to reply: {refusal[:100]!r}")
    raise RequestFailure("its reply contains reasoning, but no answer" if thought else "its reply is empty")


def _describe_incomplete(reason: Any) -> str | None:
    """Return a description of an incomplete reply; `None` for a complete reply or an unknown finish reason."""
    if not isinstance(reason, str):
        return None
    name = reason.rpartition(".")[2].casefold().replace("-", "_")  # some servers write `FinishReason.MAX_TOKENS`
    finish = f"(finish_reason {reason[:60]!r})"
    if name in _TRUNCATED_REASONS:
        return f"its reply was truncated {finish}: raise `max_reply_tokens` of the reward 'judge'"
    if name in _FILTERED_REASONS:
        return f"its reply was refused, or truncated by a content filter {finish}"
    return f"its server failed during a reply {finish}" if name in _FAILED_REASONS else None


def _join_parts(content: Any) -> str:
    """Return the text of message content, which may be a list of parts; reasoning parts are left out.

    Raises:
        TypeError: The content is neither a string nor a list.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError("content must be a string or a list of parts")
    texts = [part if isinstance(part, str) else part.get("text") for part in content if _is_text(part)]
    return "".join(text for text in texts if isinstance(text, str))


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type", "text") in ("text", "output_text"))
