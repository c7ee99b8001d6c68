"""Throughput of the reward `remote` while its service fails, compared with the same reward in a local worker pool.

    this process: reward `remote` ──► service process: latency, faults, `RewardServer` ──► its worker
                  reward `math`   ──► worker

A fault is a status 500, a dropped connection, or a garbage body, before or after the answers were scored.
"""

import asyncio
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import MathReward, RemoteReward
from roll.config.sandbox import SandboxConfig
from roll.errors import RewardInfraError
from roll.rewards import build_reward
from roll.rewards.compose import WeightedReward
from roll.rewards.opening import open_reward_lists
from roll.rewards.remote.server import RewardServer
from roll.types import Rollout

FAULT_SHARE = 0.05
MAX_LATENCY_S = 0.02
IN_FLIGHT = 512


class FaultyServer(RewardServer):
    """A reward server that delays replies and fails on purpose."""

    draw = random.Random(0)

    async def _handle_score(self, request: web.Request) -> web.Response:
        fault = self.draw.choice(("status", "drop", "garbage")) if self.draw.random() < FAULT_SHARE else ""
        scores_first = self.draw.random() < 0.5
        await asyncio.sleep(self.draw.random() * MAX_LATENCY_S)
        if fault and not scores_first:
            await request.read()
            return self._fail(request, fault)
        response = await super()._handle_score(request)
        return self._fail(request, fault) if fault else response

    @staticmethod
    def _fail(request: web.Request, fault: str) -> web.Response:
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
        if fault == "status":
            return web.Response(status=500, text="injected")
        return web.Response(body=b'{"results": [{"value": NaN', content_type="application/json")


def _serve(channel: Connection) -> None:
    async def main() -> None:
        pool = LocalWorkerPool(1)
        lists = {"": [MathReward(type="math")]}
        async with (
            open_reward_lists(lists, SandboxConfig(), pool) as rewards,
            FaultyServer(rewards, lists, pool, max_pending=100_000, drain_s=1.0) as server,
        ):
            channel.send(server.url)
            await asyncio.to_thread(channel.recv)
            channel.send(dict(server._counts))
        await pool.close()

    asyncio.run(main())


async def _score_all(reward: WeightedReward, rollouts: Sequence[Rollout]) -> tuple[float, list[float | None]]:
    """Score all rollouts, `IN_FLIGHT` at a time; return the wall time, and the values, `None` for a failure."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def score(rollout: Rollout) -> float | None:
        async with places:
            try:
                return (await reward(rollout)).value
            except RewardInfraError:
                return None

    started = time.perf_counter()
    values = await asyncio.gather(*map(score, rollouts))
    return time.perf_counter() - started, values


async def _compare(
    pairs: Sequence[tuple[str, str]], make: Callable[[str, str], Rollout], num: int, url: str
) -> dict[str, Any]:
    rollouts = [make(f"Answer {i}. {pairs[i % len(pairs)][0]}", pairs[i % len(pairs)][1]) for i in range(num)]
    pool = LocalWorkerPool(1)
    local = build_reward([MathReward(type="math")], pool)
    remote = build_reward([RemoteReward(type="remote", url=url, backoff_s=0.1, max_attempts=8)], pool)
    warm_up = [make(*pair) for pair in pairs]
    await _score_all(local, warm_up)
    await _score_all(remote, warm_up)
    spent = {"local": 0.0, "remote": 0.0}
    values: dict[str, list[float | None]] = {"local": [], "remote": []}
    part = num // 4
    for begin in range(0, num, part):  # in turns, because the load of the machine changes
        for name, reward in (("local", local), ("remote", remote)):
            wall_s, found = await _score_all(reward, rollouts[begin : begin + part])
            spent[name] += wall_s
            values[name] += found
    await remote.close()
    await local.close()
    await pool.close()
    outcomes = Counter(
        "infra_error" if there is None else "same" if here == there else "other"
        for here, there in zip(values["local"], values["remote"], strict=True)
    )
    return {
        "num_calls": num,
        "fault_share": FAULT_SHARE,
        "local_per_s": num / spent["local"],
        "remote_per_s": num / spent["remote"],
        "ratio": spent["local"] / spent["remote"],
        "outcomes": dict(outcomes),
    }


def measure_remote(
    pairs: Sequence[tuple[str, str]], make: Callable[[str, str], Rollout], num: int = 10_000
) -> dict[str, Any]:
    """Score `num` answers in the local pool, and with the failing service.

    Args:
        pairs: Answers with their references.
        make: Makes a rollout from an answer and its reference.
        num: Number of answers.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    try:
        found = asyncio.run(_compare(pairs, make, num, ours.recv()))
        ours.send("stop")
        return {**found, "service": ours.recv()}
    finally:
        process.join(30)
