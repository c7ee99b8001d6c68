"""When a group is given up before its end: only if none of the groups that it may still become could pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from roll.rollout import SamplingPlan
from roll.rollout.group_run import GroupRun
from roll.types import Prompt, PromptDraw, RewardResult, Rollout, SamplingParams

DRAW = PromptDraw(draw_id=0, prompt=Prompt(uid="d/0", domain="d", messages=()), token_ids=np.zeros(1, np.int32))
PLAN = SamplingPlan(purpose="train", group_size=2, sampling=SamplingParams(max_new_tokens=4))


class Attempts:
    """End when the test says so."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], asyncio.Future[Rollout]] = {}

    async def generate_and_score(self, draw: PromptDraw, index: int, plan: SamplingPlan, **_: Any) -> Rollout:
        answer = self.answers[plan.purpose, index] = asyncio.get_running_loop().create_future()
        return await answer

    async def finish(self, index: int, reward: float, purpose: str = "train") -> None:
        no_numbers = np.zeros(0, np.float32)
        rollout = Rollout(
            draw_id=0,
            index=index,
            prompt=DRAW.prompt,
            prompt_token_ids=DRAW.token_ids,
            token_ids=np.zeros(0, np.int32),
            logprobs=no_numbers,
            policy_versions=np.zeros(0, np.int32),
            finish_reason="stop",
            text="",
            reward=RewardResult(value=reward),
        )
        self.answers[purpose, index].set_result(rollout)
        for _ in range(3):
            await asyncio.sleep(0)


def all_wrong(finished: Sequence[Rollout], num_missing: int) -> bool:
    """Of a filter that wants a mean above 0.5 of rewards between 0 and 1: a single 0 of two is too many."""
    rewards = [r.reward.value for r in finished if r.reward is not None]
    return (sum(rewards) + num_missing) / (len(rewards) + num_missing) <= 0.5


async def started(**settings: Any) -> tuple[GroupRun, Attempts]:
    attempts: Any = Attempts()
    run = GroupRun(DRAW, settings.pop("plans", (PLAN,)), attempts, early_stop=all_wrong, **settings)
    await asyncio.sleep(0)
    return run, attempts


async def test_early_stopping_run_a_rollout_that_surely_counts_dooms_its_group() -> None:
    run, attempts = await started()
    await attempts.finish(1, 0.0)
    assert run.stopped_early


@pytest.mark.parametrize(("index", "counts"), [(0, True), (1, True), (2, False)])
async def test_early_stopping_run_a_redundant_rollout_dooms_nothing_while_those_before_it_may_make_the_group(
    index: int, counts: bool
) -> None:
    run, attempts = await started(num_launched=3)
    await attempts.finish(index, 0.0)
    assert run.stopped_early is counts
    if not counts:
        await attempts.finish(0, 1.0)
        await attempts.finish(1, 1.0)
        assert not run.stopped_early
        assert [r.index for r in run.group.rollouts] == [0, 1]


async def test_early_stopping_run_what_finished_first_counts_where_that_is_chosen() -> None:
    run, attempts = await started(num_launched=3, first_finished=True)
    await attempts.finish(2, 0.0)
    assert run.stopped_early
