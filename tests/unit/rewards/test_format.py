"""Form: tags, patterns and schemas; and gates, which make a form a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RewardList, expand_rewards
from roll.errors import ConfigError
from roll.rewards import build_reward
from roll.rewards.compose import WeightedReward
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]
GOOD = "<think>3 + 4</think>\n<answer>7</answer>"


def build(pool: LocalWorkerPool, *entries: Any) -> WeightedReward:
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(list(entries))), pool)


def form(**settings: Any) -> dict[str, Any]:
    return {"type": "format", **settings}


@pytest.mark.parametrize(
    ("text", "settings", "verdict"),
    [
        (GOOD, {}, "fine"),
        (f"Well. {GOOD} Bye.", {}, "fine"),
        ("<answer>7</answer><think>3</think>", {}, "<answer> comes too early"),
        ("<think>3</think>", {}, "<answer> occurs 0 times"),
        ("<think>3</think><answer>7", {}, "</answer> occurs 0 times"),
        (f"{GOOD}<answer>8</answer>", {}, "<answer> occurs 2 times"),
        ("<think>3</think></answer>7<answer>", {}, "</answer> comes before <answer>"),
        ("<think> </think><answer>7</answer>", {}, "<think> is empty"),
        ("<think>a<answer>b</think>7</answer>", {}, "<answer> comes too early"),
        (f"Well. {GOOD}", {"only_tags": True}, "text before <think>"),
        ("<think>3</think> so <answer>7</answer>", {"only_tags": True}, "text before <answer>"),
        (f"{GOOD} Bye", {"only_tags": True}, "text after </answer>"),
        (f" {GOOD}\n", {"only_tags": True}, "fine"),
        ("3 + 4</think><answer>7</answer>", {"first_tag_open": True, "only_tags": True}, "fine"),
        (GOOD, {"first_tag_open": True}, "<think> occurs 2 times"),
    ],
)
async def test_reward_format_tags(
    pool: LocalWorkerPool, rollout: MakeRollout, text: str, settings: dict[str, Any], verdict: str
) -> None:
    result = await build(pool, form(tags=["think", "answer"], **settings))(rollout(text))
    assert (result.value, result.verdict, result.correct) == (float(verdict == "fine"), verdict, None)


SCHEMA = {
    "type": "object",
    "required": ["answer"],
    "properties": {"answer": {"type": "integer"}, "steps": {"type": "array", "items": {"type": "string"}}},
}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"answer": 7}', "fine"),
        ('```json\n{"answer": 7, "steps": ["a"]}\n```', "fine"),
        ('{"answer": NaN, "steps": ["a"]}', "not JSON"),
        ('{"answer": 7, "steps": ["a"], "more": -Infinity}', "not JSON"),
        ('{"answer": "7"}', "JSON does not match its schema at 'answer' (type)"),
        ('{"answer": 7, "steps": ["a", 1]}', "JSON does not match its schema at 'steps[1]' (type)"),
        ("{}", "JSON does not match its schema at 'the top' (required)"),
        ("7 it is", "not JSON"),
        ("[" * 50_000, "not JSON"),
    ],
)
async def test_reward_format_schemas(pool: LocalWorkerPool, rollout: MakeRollout, text: str, verdict: str) -> None:
    result = await build(pool, form(json_schema=SCHEMA))(rollout(text))
    assert (result.value, result.verdict) == (float(verdict == "fine"), verdict)


async def test_reward_format_json_may_stand_in_a_tag_and_requirements_may_count_one_by_one(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    settings = form(tags=["answer"], json_schema=SCHEMA, json_tag="answer", pattern="<answer>.*", partial=True)
    reward = build(pool, settings)
    assert (await reward(rollout('<answer>{"answer": 7}</answer>'))).value == 1.0
    assert (await reward(rollout('<answer>{"answer": "7"}</answer>'))).value == pytest.approx(2 / 3)
    no_tag = await reward(rollout('{"answer": 7}'))
    assert (no_tag.value, no_tag.verdict) == (0.0, "<answer> occurs 0 times")


async def test_reward_format_a_pattern_must_match_all_of_it(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward = build(pool, form(pattern=r"So:.*\d"))
    assert (await reward(rollout("So:\n7"))).value == 1.0
    assert (await reward(rollout("So: 7."))).verdict == "does not match the pattern"
    hostile = build(pool, form(pattern=r"(a+)+b", time_limit_s=0.3))
    assert (await hostile(rollout("a" * 60))).verdict == "timeout"


async def test_reward_format_a_schema_that_is_none_is_refused_at_once(pool: LocalWorkerPool) -> None:
    with pytest.raises(
        ConfigError, match=r"json_schema of the reward 'format' is not a valid JSON Schema, at 'properties.a.type'"
    ):
        build(pool, form(json_schema={"properties": {"a": {"type": "nmuber"}}}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "at least one of tags, pattern and json_schema"),
        ({"tags": ["a", "a"]}, "contains duplicate tags"),
        ({"tags": ["<a>"]}, "is not a valid tag name"),
        ({"pattern": "x", "only_tags": True}, "require tags"),
        ({"tags": ["a"], "json_schema": {}, "json_tag": "b"}, "json_tag requires json_schema .* got 'b'"),
        ({"pattern": "("}, "is not a valid regular expression"),
    ],
)
def test_reward_format_settings_that_ask_for_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(RewardList).validate_python([form(**settings)])


async def test_reward_format_behind_a_gate_everything_is_worth_nothing(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    gate = form(tags=["answer"], gate=True, weight=0.25)
    reward = build(pool, gate, {"type": "math", "weight": 2.0})
    good = await reward(rollout("<answer>7</answer>", "7"))
    assert (good.value, good.correct, good.verdict) == (2.25, True, "correct")
    closed = await reward(rollout("It is 7", "7"))
    assert (closed.value, closed.correct, closed.verdict) == (0.0, False, "format: <answer> occurs 0 times")
    assert dict(closed.components) == {"format": 0.0}  # mathematics was not asked
    wrong = await reward(rollout("<answer>8</answer>", "7"))
    assert (wrong.value, wrong.correct) == (0.25, False)


async def test_reward_format_a_gate_may_ask_for_any_value_and_add_nothing(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    short = {"type": "length", "free_tokens": 0, "full_tokens": 2, "gate": -0.5, "weight": 0.0}
    from dataclasses import replace

    import numpy as np

    reward = build(pool, short, "exact")
    one, two = (replace(rollout("a", "a"), token_ids=np.zeros(n, np.int32)) for n in (1, 2))
    assert (await reward(one)).value == 1.0  # penalty -0.5 reaches the mark
    assert ((await reward(two)).value, (await reward(two)).correct) == (0.0, False)


async def test_reward_format_what_is_only_watched_decides_nothing_but_is_heard(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    reward = build(pool, "math", {"type": "exact", "weight": 0.0})
    result = await reward(rollout("It is 7", "7"))
    assert (result.value, result.correct, result.verdict) == (1.0, True, "correct")
    assert dict(result.decisions) == {"math": True, "exact": False}
    assert dict(result.components) == {"math": 1.0, "exact": 0.0}


async def test_reward_format_no_gate_is_no_gate(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward = build(pool, form(tags=["answer"], gate=False), "math")
    assert (await reward(rollout("It is 7", "7"))).value == 1.0
