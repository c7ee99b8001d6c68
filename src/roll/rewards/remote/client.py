"""Scores answers with an HTTP service, in batches.

    rollout ──► cached? ──► batcher ──► POST /score ──► results, one by one ──► Judgement, cached
                               ▲           └── failure: wait (with jitter), join another batch
                               └────────────── the last attempt sends each answer alone

Invariants: every answer gets its own result or an infrastructure error; a failure between ROLL and the service is never
converted to a reward; an answer that waits for a retry uses no slot; at most `max_concurrent` requests run; the memory
that a reply takes is bounded, whatever the service sends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from roll.config.rewards import RemoteReward
from roll.errors import ConfigError, MalformedPromptError, RewardInfraError, UnscorableError
from roll.rewards.base import Judgement
from roll.rewards.batching import Batcher
from roll.rewards.endpoint import (
    MAX_WAIT_S,
    Endpoint,
    RejectedRequestError,
    RequestFailure,
    compute_wait_s,
    read_api_key,
)
from roll.rewards.remote.protocol import (
    MAX_BODY_BYTES,
    ItemResult,
    ScoreReply,
    build_request,
    describe_invalid,
    encode_item,
)
from roll.rewards.reply_cache import ReplyCache
from roll.types import Rollout

__all__ = ["RemoteScorer", "ServiceUnreachableError"]

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_BODY_BYTES // 2
"""Size at which a batch is split into several requests."""
MAX_PART_NAMES = 256
"""Maximum number of distinct parts in all results of a service; each becomes a metric."""
MAX_VERDICT_CHARS = 200
_ITEM_STATUSES = {400, 413, 422}
"""HTTP statuses that may be caused by a single answer of a request; the other answers are then sent again without
it."""
_USER_ERRORS = {
    401: "the token is not accepted",
    403: "the token lacks the permission",
    404: "the address does not exist",
    405: "the address does not accept POST requests",
}


class ServiceUnreachableError(RewardInfraError):
    """The service cannot be reached, or did not reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Retry:
    """The outcome of an item whose request failed and can be retried."""

    cause: str
    jitter: float
    """Drawn once for all answers of the request, so that they wait for the same time and form a batch again."""
    required_s: float = 0.0
    has_reply: bool = True


class RemoteScorer:
    """Requests scores from the service of one reward.

    Args:
        config: The address and the settings of requests.
        sleep: Waits between attempts.
        jitter: Returns a random number between 0 and 1 for each failed request.

    Raises:
        ConfigError: The environment variable for the token is not set.
    """

    def __init__(
        self,
        config: RemoteReward,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._sleep, self._jitter = sleep, jitter
        self._service = f"the reward service at {config.url}"
        self._endpoint = Endpoint(
            config.url,
            key=read_api_key(config.api_key_env, self._service),
            time_limit_s=config.time_limit_s,
            follow_redirects=False,
        )
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._batcher: Batcher[bytes, ItemResult | _Retry | Exception] = Batcher(
            self._score_batch, batch_size=config.batch_size, num_runners=config.max_concurrent, name=self._service
        )
        self._cache = ReplyCache(config.cache_size, config.cache_dir)
        self._pending: dict[str, asyncio.Task[ItemResult]] = {}
        self._part_names: set[str] = set()
        self._logged_failure = False
        self._has_result = False
        """True if the service has returned a valid reply, so that its address and the token are correct."""

    async def judge(self, rollout: Rollout) -> Judgement:
        """Score one answer.

        Raises:
            RewardInfraError: The service cannot be reached, or did not return a valid result.
            UnscorableError, MalformedPromptError: Retrying cannot help.
            ConfigError: The user must correct a setting.
        """
        config = self._config
        item = encode_item(rollout, config.metadata_keys, with_token_ids=config.send_token_ids)
        return self._make_judgement(await self._find_result(item), rollout.prompt.uid)

    async def _find_result(self, item: bytes) -> ItemResult:
        """Return the result of an item: from the cache, from an identical item that is being scored, or from a
        request."""
        if not self._config.cache_size:
            return await self._request(item)
        key = hashlib.blake2b(self._config.url.encode() + b"\0" + item, digest_size=20).hexdigest()
        if (cached := self._cache.get(key)) is not None:
            try:
                return ItemResult.model_validate_json(cached)
            except ValidationError:  # the file may have results of another version
                pass
        task = self._pending.get(key)
        if task is None:
            task = asyncio.create_task(self._request(item), name=f"remote-reward-{key[:8]}")
            self._pending[key] = task
            task.add_done_callback(lambda done: self._store_result(key, done))
        # Other rollouts may wait for the same task: canceling one of them must not cancel the request.
        return await asyncio.shield(task)

    def _store_result(self, key: str, task: asyncio.Task[ItemResult]) -> None:
        del self._pending[key]
        if task.cancelled() or task.exception() is not None:
            return
        result = task.result()
        # Errors and timeouts may depend on the load of the service, so only values are cached.
        if result.error is None and not result.timed_out:
            short = result.model_copy(update={"verdict": result.verdict[:MAX_VERDICT_CHARS]})
            self._cache.put(key, short.model_dump_json(exclude_defaults=True))

    async def _request(self, item: bytes) -> ItemResult:
        """Request the result of one item, with retries."""
        config = self._config
        failed = _Retry(cause="", jitter=0.0)
        for attempt in range(config.max_attempts):
            if attempt:
                await self._sleep(compute_wait_s(attempt, config.backoff_s, failed.jitter, failed.required_s))
            # An answer that breaks the service makes every batch fail that contains it. The last attempt sends each
            # answer alone, so that the other answers of its batches are scored.
            is_last = 0 < attempt == config.max_attempts - 1
            outcome = (await self._send([item]))[0] if is_last else await self._batcher.submit(item)
            if isinstance(outcome, ItemResult):
                return outcome
            if isinstance(outcome, Exception):
                raise outcome
            failed = outcome
        times = f"{config.max_attempts} consecutive times" if config.max_attempts > 1 else "once"
        error = RewardInfraError if failed.has_reply else ServiceUnreachableError
        raise error(f"{self._service} failed {times}; the last error: {failed.cause}")

    async def _score_batch(self, items: Sequence[bytes]) -> list[ItemResult | _Retry | Exception]:
        return [outcome for part in _split_by_size(items) for outcome in await self._send(part)]

    async def _send(self, items: Sequence[bytes]) -> Sequence[ItemResult | _Retry | Exception]:
        """Send one request, and return an outcome for each item."""
        request_id = secrets.token_hex(8)
        try:
            async with self._slots:
                reply = await self._endpoint.post("/score", build_request(request_id, items))
            results = _parse_reply(reply, request_id, len(items))
            self._has_result = True
            return results
        except RequestFailure as failure:
            return [self._build_retry(failure)] * len(items)
        except RejectedRequestError as rejection:
            if self._has_result and (rejection.status in _USER_ERRORS or 300 <= rejection.status < 400):
                # The settings have worked before: a proxy replies this way while the service restarts.
                return [self._build_retry(RequestFailure(rejection.reason))] * len(items)
            if len(items) > 1 and rejection.status in _ITEM_STATUSES:
                middle = len(items) // 2
                return [*await self._send(items[:middle]), *await self._send(items[middle:])]
            return [self._build_rejection(rejection)] * len(items)

    def _build_retry(self, failure: RequestFailure) -> _Retry:
        self._log_failure(failure)
        return _Retry(
            cause=failure.cause, jitter=self._jitter(), required_s=failure.wait_s, has_reply=failure.has_reply
        )

    def _build_rejection(self, rejection: RejectedRequestError) -> Exception:
        status, reason = rejection.status, rejection.reason
        if status in _USER_ERRORS:
            return ConfigError(
                f"{self._service} rejected requests: {_USER_ERRORS[status]} ({reason}). Check `url` and `api_key_env` "
                "of the reward 'remote'."
            )
        if 300 <= status < 400:
            return ConfigError(
                f"{self._service} redirected the request ({reason}): set `url` of the reward 'remote' to the address "
                "of the service itself."
            )
        return UnscorableError(f"{self._service} cannot score this answer: {reason}")

    def _log_failure(self, failure: RequestFailure) -> None:
        """Log a failed request that will be retried; only the first failure is logged as a warning."""
        if self._config.max_attempts == 1:
            return
        level = logging.INFO if self._logged_failure else logging.WARNING
        self._logged_failure = True
        note = f", which requires a wait of {failure.wait_s:.0f} s" if failure.wait_s > MAX_WAIT_S else ""
        logger.log(
            level,
            "A request to %s failed%s: %s. ROLL resends its answers, up to %d times.",
            self._service,
            note,
            failure.cause,
            self._config.max_attempts - 1,
        )

    def _make_judgement(self, result: ItemResult, uid: str) -> Judgement:
        config = self._config
        if result.error is not None:
            problem = f"{self._service} could not score it: {result.error[:500]}"
            if result.kind == "malformed_prompt":
                raise MalformedPromptError(uid, problem)
            raise (UnscorableError if result.kind == "unscorable" else RewardInfraError)(problem)
        assert result.value is not None  # checked by `_parse_reply`
        correct: bool | None = None
        if config.solved_at is not None:
            correct = result.value >= config.solved_at
        elif config.decides:
            correct = False if result.timed_out else result.correct
            if correct is None:
                raise ConfigError(
                    f"{self._service} returned a result without `correct`: set `solved_at` of the reward 'remote' to "
                    "the reward at or above which a task is solved, or `decides: false` if the service does not "
                    "decide this."
                )
        new_names = result.parts.keys() - self._part_names
        if len(self._part_names) + len(new_names) > MAX_PART_NAMES:
            raise RewardInfraError(
                f"{self._service} returned more than {MAX_PART_NAMES} distinct names in `parts`: return a fixed set "
                "of names, because each one becomes a metric"
            )
        self._part_names |= new_names
        verdict = result.verdict[:MAX_VERDICT_CHARS] or f"{result.value:g}"
        return Judgement(
            value=result.value, verdict=verdict, correct=correct, parts=result.parts, timed_out=result.timed_out
        )

    async def close(self) -> None:
        """End running requests and close connections. Calling it twice is safe."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._batcher.close()
        await self._endpoint.close()
        self._cache.close()


def _split_by_size(items: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield the items in parts of at most `MAX_REQUEST_BYTES`; a larger item is a separate part."""
    part: list[bytes] = []
    num_bytes = 0
    for item in items:
        if part and num_bytes + len(item) > MAX_REQUEST_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += len(item)
    if part:
        yield part


def _parse_reply(raw: bytes, request_id: str, num_items: int) -> list[ItemResult]:
    """Return the results in a reply.

    Raises:
        RequestFailure: The reply is not valid.
    """
    try:
        reply = ScoreReply.model_validate_json(raw)
    except ValidationError as error:
        raise RequestFailure(f"its reply is invalid: {describe_invalid(error)} (reply: {raw[:100]!r})") from None
    if reply.id is not None and reply.id != request_id:
        raise RequestFailure(f"its reply has the id {reply.id[:40]!r}, but the request has {request_id!r}")
    if len(reply.results) != num_items:
        raise RequestFailure(f"its reply has {len(reply.results)} results for {num_items} answers")
    for index, result in enumerate(reply.results):
        if result.error is None and result.value is None:
            raise RequestFailure(f"result {index} of its reply has neither `value` nor `error`")
    return reply.results
