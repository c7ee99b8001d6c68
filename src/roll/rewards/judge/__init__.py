"""A language model as a judge: it scores an answer, or compares it with a reference.

    rollout ──► messages ──► cached reply? ──► Judgement
                              └─ no ─► one request for all equal ones ──► readable? cache it
                                                                           └─ no: ask again, with the error

Invariants: equal concurrent requests are one request; only readable replies are cached; every failure between ROLL and
the judge is an `InfraError`, including a `TimeoutError` of the network, and never a reward.
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
from roll.rewards.judge.cache import ReplyCache, content_key
from roll.rewards.judge.chat import Chat, EndpointChat
from roll.rewards.judge.engine_judge import EngineChat, JudgeModel, JudgeUsage
from roll.rewards.judge.replies import ReplyError, read_preference, read_score
from roll.rewards.judge.rubrics import (
    pairwise_messages,
    pairwise_schema,
    pointwise_messages,
    pointwise_schema,
    repair_messages,
)
from roll.types import Message, Rollout

__all__ = ["Judge", "judge_verifier"]

T = TypeVar("T")


class Judge:
    """Requests verdicts from a model.

    Args:
        config: The judge's settings.
        chat: The model.
        usage: Counts verdicts.
    """

    def __init__(self, config: JudgeReward, chat: Chat, usage: JudgeUsage | None = None) -> None:
        self._config = config
        self._chat = chat
        self._cache = ReplyCache(config.cache_size, config.cache_dir)
        self._under_way: dict[str, asyncio.Task[str]] = {}
        self._usage = usage or JudgeUsage()

    async def judge(self, rollout: Rollout) -> Judgement:
        """Score or compare an answer.

        Raises:
            RewardInfraError: The judge cannot be reached, or never replied in the required format.
            UserError: The user must correct something.
        """
        answer = rollout.text[-self._config.max_answer_chars :]
        if not answer.strip():
            return self._judgement(0.0, "no answer", {})
        if self._config.mode == "pairwise":
            return await self._compare(rollout, answer)
        lowest, highest = self._config.scale
        explain = self._config.explain
        messages = pointwise_messages(
            rollout.prompt.asked,
            answer,
            self._reference(rollout),
            self._config.rubric,
            (lowest, highest),
            explain=explain,
        )
        value = await self._asked(
            messages,
            pointwise_schema(lowest, highest, explain=explain),
            lambda reply: read_score(reply, lowest, highest),
        )
        return self._judgement(value, f"{lowest + value * (highest - lowest):g} of {highest}", {})

    async def _compare(self, rollout: Rollout, answer: str) -> Judgement:
        """Compare two answers in both orders, so that a preference for a position wins one and loses the other."""
        messages, reference = rollout.prompt.asked, self._reference(rollout)
        rubric, explain = self._config.rubric, self._config.explain
        schema = pairwise_schema(explain=explain)
        first, second = await asyncio.gather(
            *(
                self._asked(pairwise_messages(messages, *pair, rubric, explain=explain), schema, read_preference)
                for pair in ((answer, reference), (reference, answer))
            )
        )
        value = (first.points + 1.0 - second.points) / 2
        same = (first.winner, second.winner) in {("A", "B"), ("B", "A"), ("tie", "tie")}
        verdict = {"A": "better", "tie": "alike", "B": "worse"}[first.winner] if same else "depends on the order"
        return self._judgement(value, verdict, {"consistent": float(same)})

    def _judgement(self, value: float, verdict: str, parts: Mapping[str, float]) -> Judgement:
        solved = None if self._config.solved_at is None else value >= self._config.solved_at
        return Judgement(value=value, verdict=verdict, correct=solved, parts=parts)

    def _reference(self, rollout: Rollout) -> str:
        key = self._config.reference_key
        if key is None:
            return rollout.prompt.answer
        if key not in rollout.prompt.metadata:
            known = ", ".join(map(repr, rollout.prompt.metadata)) or "none"
            raise DataError(
                f"prompt '{rollout.prompt.uid}' has no column '{key}' (it has: {known}): set `reference_key` of the "
                "reward 'judge' to the right one."
            )
        return str(rollout.prompt.metadata[key])

    async def _asked(self, messages: Sequence[Message], schema: Mapping[str, Any], read: Callable[[str], T]) -> T:
        """Return the value that `read` parses from the judge's reply, cached or new."""
        config = self._config
        key = content_key(
            self._chat.identity,
            [message.to_dict() for message in messages],
            config.temperature,
            config.max_reply_tokens,
            list(schema["properties"]),
        )
        self._usage.num_asked += 1
        kept = self._cache.get(key)
        if kept is not None:
            with suppress(ReplyError):  # the file may hold replies that only an earlier version could parse
                value = read(kept)
                self._usage.num_kept += 1
                return value
        if not config.cache_size:
            return read(await self._readable(messages, schema, read))
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._readable(messages, schema, read), name=f"judge-{key[:8]}")
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        return read(await asyncio.shield(task))

    def _settle(self, key: str, task: asyncio.Task[str]) -> None:
        del self._under_way[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.put(key, task.result())

    async def _readable(
        self, messages: Sequence[Message], schema: Mapping[str, Any], read: Callable[[str], object]
    ) -> str:
        """Return a reply that `read` can parse; if it cannot, the judge is prompted again with the error."""
        asked = list(messages)
        problem = ""
        for _ in range(self._config.parse_attempts):
            reply = await self._chat.ask(asked, schema)
            try:
                read(reply)
            except ReplyError as error:
                problem = str(error)
                asked = repair_messages(messages, reply, problem)
            else:
                return reply
        raise RewardInfraError(
            f"the judge '{self._chat.name}' gave no readable verdict in {self._config.parse_attempts} attempts; the "
            f"last time: {problem}"
        )

    async def close(self) -> None:
        """End running requests and close connections; may be called twice."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._chat.close()
        self._cache.close()


def judge_verifier(config: JudgeReward, runs_in: WorkerPool | JudgeModel | None) -> Verifier:
    """Build the verifier, which sends requests from the controller's event loop without blocking it.

    Args:
        config: The judge's prompt and endpoint.
        runs_in: The run's own judge model, if the reward uses it.

    Raises:
        ConfigError: The environment variable for the API key is not set, or there is no judge.
    """
    if not config.asks_own_judge:
        judge = Judge(config, EndpointChat(config))
    elif isinstance(runs_in, JudgeModel):
        judge = Judge(config, EngineChat(config, runs_in), runs_in.usage)
    else:
        raise ConfigError(
            "the reward 'judge' has no `url`, and here is no run with a judge of its own: name an endpoint as `url`, "
            "or give a configuration with a section `judge`."
        )
    return Verifier(judge=judge.judge, decides=config.solved_at is not None, close=judge.close)
