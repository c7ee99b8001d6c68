"""Rewards for answers about images: boxes, points and text that was read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RewardList, expand_rewards
from roll.errors import UnscorableError
from roll.rewards import build_reward
from roll.rewards.compose import WeightedReward
from roll.rewards.edit_distance import compute_edit_distance, compute_similarity
from roll.rewards.grounding import compute_iou, find_last_box, find_last_point
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]


def build(pool: LocalWorkerPool, entry: Any) -> WeightedReward:
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards([entry])), pool)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[10, 20, 50, 80]", (10, 20, 50, 80)),
        ("<box>(10,20),(50,80)</box>", (10, 20, 50, 80)),
        ("<|box_start|>(10, 20), (50, 80)<|box_end|>", (10, 20, 50, 80)),
        ('[{"bbox_2d": [10, 20, 50, 80], "label": "cat"}]', (10, 20, 50, 80)),
        ("10.5,20,50,80.25", (10.5, 20, 50, 80.25)),
        ("[[10, 20], [50, 80]]", (10, 20, 50, 80)),
        ("first [1, 2, 3, 4], rather [50, 80, 10, 20].", (10, 20, 50, 80)),
        ("[-10, 20, 50, 80]", (-10, 20, 50, 80)),
        ("[10, 20, 50]", None),
        ("x1=10, y1=20", None),
        ("", None),
        ("[" * 50_000, None),
        ("1," * 50_000, (1, 1, 1, 1)),
    ],
)
def test_reward_visual_the_last_box_is_read(text: str, box: tuple[float, ...] | None) -> None:
    assert find_last_box(text) == box


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("click(30, 40)", (30, 40)),
        ("[30.5, 40]", (30.5, 40)),
        ("(1, 2) and then (3,4).", (3, 4)),
        ("30, 40", None),
        ("(1, 2, 3)", None),
        ("(" * 100_000, None),
    ],
)
def test_reward_visual_the_last_point_is_read(text: str, point: tuple[float, float] | None) -> None:
    assert find_last_point(text) == point


def test_reward_visual_reading_takes_linear_time() -> None:
    began = time.process_time()
    for piece in ("(1, ", "[1,2,", "1 , 2 , 3 , ", "9" * 20 + ",", "( \t 1 , "):
        find_last_box(piece * 4_000)
        find_last_point(piece * 4_000)
    assert time.process_time() - began < 1.0


def test_reward_visual_iou_by_hand() -> None:
    assert compute_iou((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(50 / 150)
    assert compute_iou((0, 0, 10, 10), (0, 0, 10, 10)) == 1.0
    assert compute_iou((0, 0, 10, 10), (10, 0, 20, 10)) == 0.0
    assert compute_iou((0, 0, 0, 0), (0, 0, 0, 0)) == 0.0


async def test_reward_visual_boxes_are_scored_by_their_iou(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward, hits = build(pool, "box"), build(pool, {"type": "box", "score": "hit", "solved_at": 0.3})
    answer = rollout("It is at [5, 0, 15, 10].", "[0, 0, 10, 10]")
    assert (await reward(answer)).value == pytest.approx(1 / 3)
    assert (await hits(answer)).value == 1.0
    assert (await reward(rollout("no box", "[0, 0, 10, 10]"))).value == 0.0
    for reference in ("", "a box", "[3, 3, 3, 9]"):
        with pytest.raises(UnscorableError, match="must be a nonempty box"):
            await reward(rollout("[1, 2, 3, 4]", reference))


async def test_reward_visual_points_must_be_in_the_box(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward = build(pool, "point")
    for text, value in (("click(10, 20)", 1.0), ("click(9, 20)", 0.0), ("(50, 80)", 1.0), ("nothing", 0.0)):
        assert (await reward(rollout(text, "(10,20),(50,80)"))).value == value


async def test_reward_visual_read_text_is_scored_by_its_edit_distance(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    reward = build(pool, {"type": "edit_distance", "ignore_case": True, "solved_at": 0.7})
    scored = await reward(rollout("I read <answer>Kitten </answer>", "sitting"))
    assert scored.value == pytest.approx(1 - 3 / 7)
    assert scored.correct is False
    assert (await reward(rollout("SITTING", "sitting"))).value == 1.0
    assert (await reward(rollout("", ""))).value == 1.0
    assert (await reward(rollout("x" * 200_000, "sitting"))).value == 0.0


def slow_distance(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, row[0] = row[0], i
        for j, second in enumerate(other, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != second))
    return row[-1]


@given(st.text("abc\N{GRINNING FACE}", max_size=80), st.text("abc\N{GRINNING FACE}", max_size=80))
def test_reward_visual_edit_distance_is_that_of_the_dynamic_program(one: str, other: str) -> None:
    assert compute_edit_distance(one, other) == slow_distance(one, other)
    assert compute_similarity(one, one) == 1.0
