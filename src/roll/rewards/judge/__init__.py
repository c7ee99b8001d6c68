"""A language model as a judge: it scores an answer, or compares it with a reference.

    rollout ──► messages ──► cached reply? ──► Judgement
                              └─ no ─► one request for all duplicates ──► parsed? cache it
                                                                           └─ no: retry, with the error

Invariants: identical concurrent requests are sent once; only replies that can be parsed are cached; every failure
between ROLL and the judge raises an `InfraError`, including a `TimeoutError` of the network, and is never converted to
a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from roll.config.rewards import JudgeReward
from roll.errors import ConfigError, DataError, RewardInfraError
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier
from roll.rewards.judge.chat import Chat, EndpointChat
from roll.rewards.judge.engine_judge import EngineChat, JudgeModel, JudgeUsage
from roll.rewards.judge.replies import ReplyError, parse_preference, parse_score
from roll.rewards.judge.rubrics import (
    build_pairwise_messages,
    build_pairwise_schema,
    build_pointwise_messages,
    build_pointwise_schema,
    build_repair_messages,
)
from roll.rewards.reply_cache import ReplyCache, compute_content_key
from roll.types import Message, Rollout

__all__ = ["Judge", "build_judge_verifier"]

T = TypeVar("T")


class Judge:
    """Requests verdicts on answers from a judge model, with a cache.

    Args:
        config: The judge's settings.
        chat: The interface to the judge model.
        usage: Counters that are incremented for each verdict.
    """

    def __init__(self, config: JudgeReward, chat: Chat, usage: JudgeUsage | None = None) -> None:
        self._config = config
        self._chat = chat
        self._cache = ReplyCache(config.cache_size, config.cache_dir)
        self._pending: dict[str, asyncio.Task[str]] = {}
        self._usage = usage or JudgeUsage()

    async def judge(self, rollout: Rollout) -> Judgement:
        """Score or compare an answer.

        Raises:
            RewardInfraError: The judge cannot be reached, or none of its replies had the required format.
            UserError: A setting or the data is invalid.
        """
        answer = rollout.text[-self._config.max_answer_chars :]
        if not answer.strip():
            return self._make_judgement(0.0, "no answer", {})
        if self._config.mode == "pairwise":
            return await self._compare(rollout, answer)
        lowest, highest = self._config.scale
        explain = self._config.explain
        messages = build_pointwise_messages(
            rollout.prompt.input_messages,
            answer,
            self._get_reference(rollout),
            self._config.rubric,
            (lowest, highest),
            explain=explain,
        )
        value = await self._request(
            messages,
            build_pointwise_schema(lowest, highest, explain=explain),
            lambda reply: parse_score(reply, lowest, highest),
        )
        return self._make_judgement(value, f"{lowest + value * (highest - lowest):g} of {highest}", {})

    async def _compare(self, rollout: Rollout, answer: str) -> Judgement:
        """Compare an answer with the reference in both orders, so that a bias toward one position cancels out."""
        messages, reference = rollout.prompt.input_messages, self._get_reference(rollout)
        rubric, explain = self._config.rubric, self._config.explain
        schema = build_pairwise_schema(explain=explain)
        first, second = await asyncio.gather(
            *(
                self._request(
                    build_pairwise_messages(messages, *pair, rubric, explain=explain), schema, parse_preference
                )
                for pair in ((answer, reference), (reference, answer))
            )
        )
        value = (first.points + 1.0 - second.points) / 2
        same = (first.winner, second.winner) in {("A", "B"), ("B", "A"), ("tie", "tie")}
        verdict = {"A": "better", "tie": "alike", "B": "worse"}[first.winner] if same else "depends on the order"
        return self._make_judgement(value, verdict, {"consistent": float(same)})

    def _make_judgement(self, value: float, verdict: str, parts: Mapping[str, float]) -> Judgement:
        solved = None if self._config.solved_at is None else value >= self._config.solved_at
        return Judgement(value=value, verdict=verdict, correct=solved, parts=parts)

    def _get_reference(self, rollout: Rollout) -> str:
        key = self._config.reference_key
        if key is None:
            return rollout.prompt.answer
        if key not in rollout.prompt.metadata:
            known = ", ".join(map(repr, rollout.prompt.metadata)) or "none"
            raise DataError(
                f"prompt '{rollout.prompt.uid}' has no column '{key}' (columns: {known}): set `reference_key` of the "
                "reward 'judge' to the correct column."
            )
        return str(rollout.prompt.metadata[key])

    async def _request(self, messages: Sequence[Message], schema: Mapping[str, Any], parse: Callable[[str], T]) -> T:
        """Return the value that `parse` parses from the judge's reply, which comes from the cache or a new request."""
        config = self._config
        key = compute_content_key(
            self._chat.identity,
            [message.to_dict() for message in messages],
            config.temperature,
            config.max_reply_tokens,
            list(schema["properties"]),
        )
        self._usage.num_verdicts += 1
        kept = self._cache.get(key)
        if kept is not None:
            with suppress(ReplyError):  # the file may hold replies that only an earlier version could parse
                value = parse(kept)
                self._usage.num_cached += 1
                return value
        if not config.cache_size:
            return parse(await self._request_valid_reply(messages, schema, parse))
        task = self._pending.get(key)
        if task is None:
            task = asyncio.create_task(self._request_valid_reply(messages, schema, parse), name=f"judge-{key[:8]}")
            self._pending[key] = task
            task.add_done_callback(lambda done: self._store_reply(key, done))
        # Other rollouts may wait for the same task: canceling one of them must not cancel the request.
        return parse(await asyncio.shield(task))

    def _store_reply(self, key: str, task: asyncio.Task[str]) -> None:
        del self._pending[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.put(key, task.result())

    async def _request_valid_reply(
        self, messages: Sequence[Message], schema: Mapping[str, Any], parse: Callable[[str], object]
    ) -> str:
        """Request a reply and return it; if `parse` cannot parse it, send the error message and request a new reply."""
        prompt = list(messages)
        problem = ""
        for _ in range(self._config.parse_attempts):
            reply = await self._chat.generate_reply(prompt, schema)
            try:
                parse(reply)
            except ReplyError as error:
                problem = str(error)
                prompt = build_repair_messages(messages, reply, problem)
            else:
                return reply
        raise RewardInfraError(
            f"the judge '{self._chat.name}' returned no valid verdict in {self._config.parse_attempts} attempts; the "
            f"last error: {problem}"
        )

    async def close(self) -> None:
        """End running requests and close connections. Calling it twice is safe."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._chat.close()
        self._cache.close()


def build_judge_verifier(config: JudgeReward, judge_model: WorkerPool | JudgeModel | None) -> Verifier:
    """Build the verifier of the reward `judge`, which sends requests from the event loop of the controller.

    Args:
        config: The judge's prompt and endpoint.
        judge_model: The run's judge model, if the reward uses it.

    Raises:
        ConfigError: The environment variable for the API key is not set, or there is no judge.
    """
    if not config.uses_own_judge:
        judge = Judge(config, EndpointChat(config))
    elif isinstance(judge_model, JudgeModel):
        judge = Judge(config, EngineChat(config, judge_model), judge_model.usage)
    else:
        raise ConfigError(
            "the reward 'judge' has no `url`, and this run has no judge model: set `url` to an endpoint, or add the "
            "section `judge` to the configuration."
        )
    return Verifier(judge=judge.judge, decides_correctness=config.solved_at is not None, close=judge.close)
