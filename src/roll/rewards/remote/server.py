"""Serves rewards over HTTP, for rewards of type `remote`.

    POST /score    see `protocol`                     ─► {"id", "results"}
    GET  /health                                      ─► {"status", "domains", "pending", "workers", …}

    request ─► token ─► number of requests ─► body ─► number of answers ─► the rewards, as in a run ─► results
                 └ 401       └ 503               └ 400, 413   └ 503

Status 503 has `Retry-After`. Invariants: an answer that a reward cannot score has an error in its result, never a value
of 0; the memory of requests is bounded; if a client disconnects, its answers are no longer scored; when the server
stops, running requests are answered first.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping, Sequence

from aiohttp import web
from pydantic import ValidationError

from roll.config.rewards import RewardConfig
from roll.errors import ConfigError, MalformedPromptError, UnscorableError, one_line_error
from roll.protocols import WorkerPool
from roll.rewards.compose import WeightedReward
from roll.rewards.remote.protocol import (
    MAX_BODY_BYTES,
    MAX_PARTS,
    ErrorKind,
    ItemResult,
    ScoreItem,
    ScoreReply,
    ScoreRequest,
    build_rollout,
    describe_invalid,
)
from roll.types import RewardResult

__all__ = ["RewardServer"]

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Maximum number of requests whose bodies are in memory; with `MAX_BODY_BYTES`, this bounds their memory."""
READ_TIMEOUT_S = 30.0
"""Timeout of reading a request's body."""
RETRY_AFTER_S = 1
_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.setLevel(logging.CRITICAL)  # aiohttp logs a traceback for each malformed request
_TOKEN_REWARDS = {"length", "repetition"}
"""Types of rewards that read the tokens of an answer."""


class RewardServer:
    """Serves the rewards of one or several domains: `async with RewardServer(rewards, lists, pool) as server: …`.

    Args:
        rewards: The rewards, by domain; a single reward scores the answers of all domains.
        lists: The settings of the rewards, by domain.
        pool: The worker pool of the rewards, for `/health`.
        host: The address to listen on.
        port: The port; 0 selects a free port.
        token: The bearer token that clients need; empty if they need none.
        max_pending: Maximum number of answers that are being scored or waiting to be scored.
        drain_s: Seconds in which running requests can finish when the server stops.
    """

    def __init__(
        self,
        rewards: Mapping[str, WeightedReward],
        lists: Mapping[str, Sequence[RewardConfig]],
        pool: WorkerPool,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        max_pending: int = 1024,
        drain_s: float = 30.0,
    ) -> None:
        self._rewards = rewards
        self._needs_tokens = {domain: _find_token_reward(configs) for domain, configs in lists.items()}
        self._pool = pool
        self._host, self._port, self._token = host, port, token
        self._max_pending, self._drain_s = max_pending, drain_s
        self._num_requests = self._num_pending = 0
        self._counts = {"requests": 0, "scored": 0, "errors": 0, "refused": 0}
        self._is_stopping = False
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL, which a reward `remote` needs as its `url`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def __aenter__(self) -> RewardServer:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/score", self._handle_score)
        app.router.add_get("/health", self._handle_health)
        # With `handler_cancellation`, answers of a client that has disconnected do not keep workers busy.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_logger,
            handler_cancellation=True,
            shutdown_timeout=self._drain_s,
            keepalive_timeout=75.0,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop accepting requests, finish the running requests, and stop the server. Calling it twice is safe."""
        self._is_stopping = True
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # ---- requests

    async def _handle_health(self, _: web.Request) -> web.Response:
        body = {
            "status": "stopping" if self._is_stopping else "ok",
            "domains": sorted(self._rewards),
            "pending": self._num_pending,
            **self._counts,
            "pool": self._pool.health(),
        }
        return web.json_response(body, status=503 if self._is_stopping else 200)

    async def _handle_score(self, request: web.Request) -> web.Response:
        if not self._is_authorized(request):
            return _build_error(401, "the bearer token is missing or invalid")
        if self._is_stopping:
            return self._reject("it is stopping")
        if self._num_requests >= MAX_REQUESTS:
            return self._reject(f"{self._num_requests} requests are running, and the limit is {MAX_REQUESTS}")
        self._num_requests += 1
        self._counts["requests"] += 1
        try:
            return await self._answer(request)
        except Exception:
            logger.exception("a request failed")
            return _build_error(500, "the service failed: see its log for details")
        finally:
            self._num_requests -= 1

    def _is_authorized(self, request: web.Request) -> bool:
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        return not self._token or hmac.compare_digest(sent, b"Bearer " + self._token.encode())

    def _reject(self, reason: str) -> web.Response:
        self._counts["refused"] += 1
        return _build_error(
            503, f"the service cannot accept the request: {reason}", {"Retry-After": str(RETRY_AFTER_S)}
        )

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _build_error(413, f"the body must not be larger than {MAX_BODY_BYTES} bytes: send fewer items")
        except TimeoutError:
            return _build_error(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s")
        except web.RequestPayloadError:
            return _build_error(400, "the body does not match the headers: it is truncated, or its encoding is invalid")
        try:
            parsed = ScoreRequest.model_validate_json(body)
        except ValidationError as error:
            return _build_error(400, describe_invalid(error))
        num_items = len(parsed.items)
        # A request that is larger than the limit is accepted when nothing else is pending; otherwise it could never be.
        if self._num_pending and self._num_pending + num_items > self._max_pending:
            return self._reject(f"{self._num_pending} answers are pending, and the limit is {self._max_pending}")
        self._num_pending += num_items
        try:
            results = await asyncio.gather(*(self._score(item) for item in parsed.items))
        finally:
            self._num_pending -= num_items
        reply = ScoreReply(id=parsed.id or None, results=list(results))
        return web.Response(body=reply.model_dump_json(exclude_defaults=True), content_type="application/json")

    async def _score(self, item: ScoreItem) -> ItemResult:
        result = await self._try_score(item)
        self._counts["scored" if result.error is None else "errors"] += 1
        return result

    async def _try_score(self, item: ScoreItem) -> ItemResult:
        domain = next(iter(self._rewards)) if len(self._rewards) == 1 else item.domain
        if domain not in self._rewards:
            served = ", ".join(sorted(self._rewards))
            return _build_failure("unscorable", f"the domain {domain[:100]!r} is not served (served: {served})")
        if item.token_ids is None and (name := self._needs_tokens[domain]):
            return _build_failure(
                "unscorable",
                f"the reward '{name}' requires `token_ids`: set `send_token_ids: true` of the reward 'remote'",
            )
        try:
            rollout = build_rollout(item)
        except ValueError as error:
            return _build_failure("malformed_prompt", f"the prompt is malformed: {error}")
        try:
            return _build_result(await self._rewards[domain](rollout))
        except MalformedPromptError as error:
            return _build_failure("malformed_prompt", error.problem)
        except UnscorableError as error:
            return _build_failure("unscorable", str(error))
        except Exception as error:  # the boundary to rewards: none of their errors may end the service
            logger.info("an answer to prompt '%s' could not be scored: %s", item.uid[:200], one_line_error(error))
            return _build_failure("infrastructure", one_line_error(error))


def _find_token_reward(configs: Sequence[RewardConfig]) -> str:
    """Return the type of the first reward that reads the tokens of an answer; empty if there is none.

    Raises:
        ConfigError: A reward cannot be served.
    """
    for config in configs:
        if config.type == "environment":
            raise ConfigError(
                "the reward 'environment' cannot be served, because it requires the episode: use it in the run itself."
            )
    return next((config.type for config in configs if config.type in _TOKEN_REWARDS), "")


def _build_result(result: RewardResult) -> ItemResult:
    # The only component of a reward has the same value as the reward, so its name would be a metric of the same values.
    names = [name for name in result.components if "/" not in name]
    only = names[0] if len(names) == 1 else None
    parts = {name.removeprefix(f"{only}/"): value for name, value in result.components.items() if name != only}
    return ItemResult(
        value=float(result.value),
        correct=result.correct,
        verdict=result.verdict,
        parts=dict(list(parts.items())[:MAX_PARTS]),
        timed_out=bool(result.timed_out),
    )


def _build_failure(kind: ErrorKind, problem: str) -> ItemResult:
    return ItemResult(error=problem[:2000], kind=kind)


def _build_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=dict(headers or {}))
