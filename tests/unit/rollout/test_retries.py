"""Attempts that failed are made again after a wait that grows, and can be interrupted; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.training import World, random_settings

from roll.errors import RewardInfraError
from roll.rollout.attempts import MAX_BACKOFF_S, RolloutRunner, SamplingPlan
from roll.rollout.lifecycle import LifeCycle, RolloutState
from roll.simulation.clock import run
from roll.types import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutStatus,
    SamplingParams,
)

PLAN = SamplingPlan(purpose="train", group_size=1, sampling=SamplingParams(max_new_tokens=4))
DRAW = PromptDraw(draw_id=0, prompt=Prompt(uid="d/0", domain="d", messages=()), token_ids=np.zeros(1, np.int32))


class AtOnce:
    """In place of a proxy."""

    async def generate(self, request: GenerationRequest, *, on_start: Any, **_: Any) -> Generation:
        on_start("a")
        nothing = np.zeros(0, np.int32)
        return Generation(
            request_id=request.request_id, token_ids=nothing, logprobs=np.zeros(0, np.float32),
            policy_versions=nothing, finish_reason="stop",
        )  # fmt: skip


def attempts(num_failures: int, asked_at: list[float], lifecycle: LifeCycle, max_attempts: int) -> RolloutRunner:
    async def reward(rollout: Rollout) -> RewardResult:
        asked_at.append(asyncio.get_running_loop().time())
        if len(asked_at) <= num_failures:
            raise RewardInfraError("the judge is away")
        return RewardResult(value=1.0)

    proxy: Any = AtOnce()
    renderer: Any = SimpleNamespace(decode=lambda ids: "", decode_final_text=lambda ids, prompt: "")
    return RolloutRunner(proxy, {"d": reward}, renderer, lifecycle, seed=0, max_attempts=max_attempts, retry_wait_s=1.0)


@pytest.mark.parametrize(
    ("num_failures", "waits"), [(0, []), (1, [1]), (3, [1, 2, 4]), (9, [1, 2, 4, 8, 16, 32, 60, 60, 60])]
)
def test_rollout_retry_each_wait_is_twice_the_last_up_to_a_minute(num_failures: int, waits: Sequence[float]) -> None:
    asked_at: list[float] = []

    async def main() -> Rollout:
        return await attempts(num_failures, asked_at, LifeCycle(), max_attempts=10).generate_and_score(DRAW, 0, PLAN)

    assert run(main()).reward is not None
    assert np.diff(asked_at).tolist() == waits
    assert max(waits, default=0) <= MAX_BACKOFF_S


def test_rollout_retry_a_wait_can_be_interrupted() -> None:
    lifecycle, asked_at = LifeCycle(), []

    async def main() -> float:
        task = asyncio.create_task(attempts(9, asked_at, lifecycle, max_attempts=9).generate_and_score(DRAW, 0, PLAN))
        await asyncio.sleep(1.5)  # between the second attempt and the third
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return asyncio.get_running_loop().time()

    assert run(main()) == 1.5
    assert len(asked_at) == 2
    assert lifecycle.totals[RolloutState.ABORTED] == 1


@pytest.mark.parametrize("num_broken", [1, 9])
def test_rollout_retry_engine_log_probs_that_are_not_finite_are_retried_and_then_no_answer_of_the_policy(
    num_broken: int,
) -> None:
    class Broken(AtOnce):
        num_asked = 0

        async def generate(self, request: GenerationRequest, *, on_start: Any, **_: Any) -> Generation:
            on_start("engine-0")
            self.num_asked += 1
            said = np.array([-1.0, np.nan if self.num_asked <= num_broken else -2.0], np.float32)
            ids = np.zeros(2, np.int32)
            return Generation(
                request_id=request.request_id, token_ids=ids, logprobs=said,
                policy_versions=ids, finish_reason="stop", engine_id="engine-0",
            )  # fmt: skip

    tried = attempts(0, [], LifeCycle(), max_attempts=3)
    tried.proxy = proxy = Broken()  # type: ignore[assignment]
    rollout = run(tried.generate_and_score(DRAW, 0, PLAN))
    assert proxy.num_asked == min(num_broken + 1, 3)
    if num_broken == 1:
        assert rollout.reward is not None and rollout.logprobs.tolist() == [-1.0, -2.0]
    else:
        assert rollout.reward is None and rollout.status is RolloutStatus.INFRA_ERROR
        assert rollout.cause.startswith("InfraError: engine 'engine-0' returned 1 of 2 log-probs that are not finite")


@pytest.mark.parametrize("who", ["reward", "engine"])
def test_rollout_retry_a_rollout_is_tried_again_where_what_it_waits_for_was_cancelled(who: str) -> None:
    async def main() -> list[Rollout]:
        world = World(replace(random_settings(0), num_engines=1, deaths=0, frailty=0.0, reward_hangs=0.0, lags=(0.0,)))
        first, engine = True, world.engines.engines[0]
        before: Any = engine.generate if who == "engine" else world._reward

        async def cancelled_once(asked: Any) -> Any:
            nonlocal first
            if first:
                first = False
                raise asyncio.CancelledError
            return await before(asked)

        if who == "engine":
            engine.generate = cancelled_once  # type: ignore[method-assign]
        else:
            world.scheduler.rewards = {"a": cancelled_once}
        groups = await world.scheduler.collect(world._draw(1, "a"), PLAN)
        await world.engines.close()
        return list(groups[0].rollouts)

    assert [rollout.status for rollout in run(main(), limit_s=10_000.0)] == [RolloutStatus.COMPLETED]
