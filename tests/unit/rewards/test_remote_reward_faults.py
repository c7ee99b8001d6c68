"""Ten thousand calls of a service that fails: every answer is scored once, and no failure becomes a reward."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web
from unit.rewards.reward_service import RewardService, open_service

from roll.config.rewards import RemoteReward
from roll.rewards.remote import RemoteScorer
from roll.types import Rollout

NUM_CALLS = 10_000
FAULT_SHARE = 0.05


def make_faulty(service: RewardService, scored: Counter[str]) -> Callable[[dict[str, Any]], Any]:
    """Score each answer by the number in it; fail now and then, and reply out of order."""
    draw = random.Random(0)

    async def reply(body: dict[str, Any]) -> web.StreamResponse:
        request = service.request
        for _ in range(draw.randrange(4)):  # later requests may overtake this one
            await asyncio.sleep(0)
        fault = draw.choice(("status", "drop", "garbage", "short")) if draw.random() < FAULT_SHARE else ""
        if fault == "status":
            return web.Response(status=draw.choice((500, 502, 503, 429)))
        if fault == "drop":
            assert request is not None and request.transport is not None
            request.transport.abort()
        results = [{"value": float(item["text"]), "correct": True} for item in body["items"]]
        if fault in ("drop", "garbage"):
            return web.Response(body=b'{"results": [{"value": 0.0, "corr')
        if fault == "short":
            return web.json_response({"id": body["id"], "results": results[:-1]})
        scored.update(item["text"] for item in body["items"])
        return web.json_response({"id": body["id"], "results": results})

    return reply


async def test_remote_reward_ten_thousand_calls_of_a_failing_service_are_scored_once(
    rollout: Callable[..., Rollout],
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    scored: Counter[str] = Counter()
    async with open_service() as service:
        service.reply = make_faulty(service, scored)
        config = RemoteReward(type="remote", url=service.url, max_attempts=8)
        scorer = RemoteScorer(config, sleep=sleep, jitter=lambda: 0.5)
        found = await asyncio.gather(*(scorer.judge(rollout(str(i + 1))) for i in range(NUM_CALLS)))
        await scorer.close()
        num_requests = len(service.bodies)
    assert [judgement.value for judgement in found] == [float(i + 1) for i in range(NUM_CALLS)]
    assert set(scored.values()) == {1} and len(scored) == NUM_CALLS
    assert len(waits) > 200  # the faults reached the answers
    assert num_requests < 1.3 * NUM_CALLS / config.batch_size
