"""Answers longer than the median are right with probability 0.8, others with 0.2: what each policy trains of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from worlds.training import Settings, World

from roll.config.scheduling import SchedulingConfig
from roll.rollout.bias import Race, bias_metrics
from roll.simulation.clock import run
from roll.types import Prompt, PromptDraw, RewardResult, Rollout, RolloutStatus

LONG = 3
"""Tokens from which an answer belongs to the longer half (see `worlds.training`)."""


class LongIsRight(World):
    """Every rollout of the step runs at once, so that the shortest finish first."""

    async def _reward(self, rollout: Rollout) -> RewardResult:
        chance = 0.8 if len(rollout.token_ids) >= LONG else 0.2
        return RewardResult(value=float(random.Random(f"right/{rollout.rollout_id}").random() < chance))


def world(num_steps: int = 12, **scheduling: Any) -> LongIsRight:
    settings = Settings(
        seed=5,
        scheduling=SchedulingConfig(**scheduling),
        batch_size=8,
        group_size=8,
        num_steps=num_steps,
        num_engines=1,
        capacity=10_000,
    )
    played: list[LongIsRight] = []

    async def main() -> None:
        played.append(LongIsRight(settings))
        await played[0].train()
        await asyncio.sleep(0)

    run(main(), seed=1, limit_s=1e6)
    return played[0]


def trained(of: World) -> dict[str, float]:
    """Rewards by rollout."""
    rollouts = [r for batch in of.batches for group in batch.groups for r in group.rollouts]
    return {r.rollout_id: r.reward.value for r in rollouts if r.reward is not None}


def figures(of: World) -> dict[str, float]:
    """Over all steps whose rollouts raced."""
    return bias_metrics([race for batch in of.batches for race in batch.races])


def test_a_plain_queue_trains_what_was_launched_and_reports_nothing() -> None:
    plain = world()
    assert np.mean(list(trained(plain).values())) == pytest.approx(0.5, abs=0.04)
    assert figures(plain) == {}


def test_redundant_rollouts_that_finish_first_lower_the_reward_and_the_estimate_says_by_how_much() -> None:
    # Of 10 rollouts the 2 longest are left out: of k ~ Bin(10, 1/2) long ones max(0, k - 2) count, 3 + 12/1024 of 8.
    expected = 0.2 + 0.6 * (3 + 12 / 1024) / 8
    redundant = world(rollout_redundancy=1.25, choose="first_finished")
    found = figures(redundant)
    assert found["selection/reward_trained"] == pytest.approx(np.mean(list(trained(redundant).values())))
    assert found["selection/reward_trained"] == pytest.approx(expected, abs=0.03)
    assert found["selection/reward_launched"] == pytest.approx(0.5, abs=0.03)
    assert found["selection/num_launched"] == 12 * 8 * 10
    assert found["selection/length_launched"] > found["selection/length_trained"]


def test_tail_batching_lowers_it_too_unless_every_rollout_of_a_prompt_counts() -> None:
    both = world(num_steps=10, type="tail_batching")
    assert np.mean(list(trained(both).values())) < 0.46
    only_prompts = world(num_steps=10, type="tail_batching", rollout_redundancy=1.0)
    assert figures(only_prompts) == {}
    ids = {f"{draw_id}.{index}" for draw_id in range(10 * 8) for index in range(8)}
    assert trained(only_prompts).keys() == ids  # all that were ever launched, so a policy that stands still is unbiased
    plain = trained(world(num_steps=10))
    assert trained(only_prompts) == plain


def rollout(index: int, reward: float, length: int) -> Rollout:
    draw = PromptDraw(draw_id=0, prompt=Prompt(uid="a", domain="a", messages=()), token_ids=np.zeros(1, np.int32))
    return Rollout(
        draw_id=0,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        policy_versions=np.zeros(length, np.int32),
        finish_reason="stop",
        text="",
        status=RolloutStatus.COMPLETED,
        reward=RewardResult(value=reward),
    )


def test_the_last_that_counted_stands_in_for_each_that_was_stopped() -> None:
    race = Race(used=(rollout(0, 0.0, 2), rollout(1, 1.0, 6)), unused=(rollout(2, 0.5, 8),), num_stopped=1)
    found = bias_metrics([race, Race(used=(rollout(0, 1.0, 4),), unused=(), num_stopped=0)])
    assert found == {
        "selection/num_launched": 5.0,
        "selection/num_stopped": 1.0,
        "selection/reward_trained": pytest.approx(2 / 3),
        "selection/reward_launched": pytest.approx((0.0 + 1.0 + 0.5 + 1.0 + 1.0) / 5),
        "selection/length_trained": 4.0,
        "selection/length_launched": pytest.approx((2 + 6 + 8 + 6 + 4) / 5),
    }
