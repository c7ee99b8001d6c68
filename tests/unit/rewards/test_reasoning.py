"""Rewards score what follows a model's reasoning, unless they are told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RewardList, expand_rewards
from roll.rewards import build_reward
from roll.rewards.code.extract import extract_code
from roll.rewards.compose import WeightedReward
from roll.rewards.reasoning import get_scored_text
from roll.types import RewardResult, Rollout

MakeRollout = Callable[..., Rollout]
HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
FORMATS = [
    "<think>{}</think>{}",
    "{}</think>\n\n{}",
    "<think>\n{}\n</think>\n\n{}",
    "[THINK]{}[/THINK]{}",
    "<seed:think>{}</seed:think>{}",
    "<|channel>thought\n{}\n<channel|>{}",
    HARMONY,
]
INSTRUCTIONS = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
NO_JSON = {"type": "format", "json_schema": {"type": "object"}}


def build(pool: LocalWorkerPool, *entries: Any) -> WeightedReward:
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(list(entries))), pool)


@pytest.fixture
def score(pool: LocalWorkerPool, rollout: MakeRollout) -> Callable[..., Any]:
    async def score(entry: Any, text: str, answer: str = "", **fields: Any) -> RewardResult:
        metadata = fields.pop("metadata", None)
        return await build(pool, entry)(replace(rollout(text, answer, metadata=metadata), **fields))

    return score


CASES: list[tuple[Any, str, str, str, str, dict[str, Any]]] = [
    # reward, reference, what is wrong, what is right, an answer that names nothing, metadata
    ("math", "7", r"It is \boxed{8}.", r"\boxed{7}", "I do not know.", {}),
    ("choice", "C", "The answer is B", "C", "I do not know.", {}),
    ("short_answer", "Paris", "<answer>Rome</answer>", "<answer>Paris</answer>", "<answer>none</answer>", {}),
    ("exact", "Paris", "Rome", "Paris", "I do not know.", {}),
    ("box", "[0, 0, 9, 9]", "[20, 20, 30, 30]", "[0, 0, 9, 9]", "I do not know.", {}),
    ("point", "[0, 0, 9, 9]", "(20, 20)", "(3, 3)", "I do not know.", {}),
    ("edit_distance", "Paris", "Ngnnc", "Paris", "<answer>ngn</answer>", {}),
    ("instructions", "", "First, second", "Blue is calm", "Blue, calm", INSTRUCTIONS),
    (NO_JSON, "", "[1]", '{"a": 1}', "none", {}),
]


@pytest.mark.parametrize(("entry", "answer", "wrong", "right", "nothing", "metadata"), CASES)
async def test_reward_reasoning_is_not_scored(
    pool: LocalWorkerPool,
    rollout: MakeRollout,
    entry: Any,
    answer: str,
    wrong: str,
    right: str,
    nothing: str,
    metadata: dict[str, Any],
) -> None:
    reward = build(pool, entry)

    async def value(text: str) -> float:
        return (await reward(rollout(text, answer, metadata=metadata))).value

    for form in FORMATS:
        assert await value(form.format(wrong, right)) == 1, form
        assert await value(form.format(right, wrong)) == 0, form
        assert await value(form.format(right, nothing)) == 0, form
        for empty in ("", "\n"):
            assert await value(form.format(right, empty)) == 0, form
        if not form.startswith("{}"):  # the thought never ends, though the answer was not cut off
            assert await value(form[: form.index("}") + 1].format(right)) == 0, form


async def test_reward_reasoning_without_an_answer_is_called_no_answer(score: Callable[..., Any]) -> None:
    result = await score("math", r"<think>\boxed{7}", "7")
    assert (result.verdict, result.correct) == ("no answer", False)


async def test_reward_reasoning_is_scored_where_it_is_kept(score: Callable[..., Any]) -> None:
    kept = {"type": "math", "reasoning": "keep"}
    assert (await score(kept, r"<think>\boxed{7}", "7")).value == 1
    assert (await score(kept, r"<think>\boxed{7}</think>I do not know.", "7")).value == 1
    assert (await score({"type": "choice", "reasoning": "keep"}, "<think>The answer is C", "C")).value == 1
    assert (await score({**NO_JSON, "reasoning": "keep"}, '<think>x</think>{"a": 1}')).value == 0


async def test_reward_reasoning_ends_with_a_tag_of_ones_own(score: Callable[..., Any]) -> None:
    own = {"type": "choice", "reasoning": "</reasoning>"}
    assert (await score(own, "<reasoning>The answer is B</reasoning>C", "C")).value == 1
    assert (await score(own, "The answer is B</reasoning>C", "C")).value == 1
    assert (await score(own, "<reasoning>The answer is C", "C")).value == 0
    assert (await score(own, "The answer is C", "C")).value == 1


async def test_reward_reasoning_is_what_the_model_showed_it_to_be(score: Callable[..., Any]) -> None:
    """The engine's tokens tell more than the text: whether the prompt began a thought, and the model's own format."""
    assert (await score("math", r"\boxed{7}", "7", final_text="")).value == 0
    assert (await score("math", r"\boxed{8} \boxed{7}", "7", final_text=r"\boxed{8}")).value == 0
    assert (await score("math", r"</think> \boxed{7}", "7", final_text=r"</think> \boxed{7}")).value == 1


async def test_reward_reasoning_counts_for_tags_and_patterns(score: Callable[..., Any]) -> None:
    tags = {"type": "format", "tags": ["think", "answer"], "pattern": "<think>.*"}
    assert (await score(tags, "<think>a</think><answer>b</answer>")).value == 1
    schema = {"type": "object"}
    both = {"type": "format", "tags": ["think"], "json_schema": schema}
    assert (await score(both, '<think>a</think>{"a": 1}')).value == 1
    tagged = {"type": "format", "tags": ["think", "answer"], "json_schema": schema, "json_tag": "answer"}
    assert (await score(tagged, '<think>a</think><answer>{"a": 1}</answer>')).value == 1


@pytest.mark.parametrize("kind", ["regex", "python", "repetition", "length"])
def test_reward_reasoning_is_kept_for_rewards_of_the_whole_text(kind: str) -> None:
    settings = {
        "regex": {"pattern": "x"},
        "python": {"function": "a.b:c"},
        "length": {"free_tokens": 1, "full_tokens": 2},
    }.get(kind, {})
    [config] = TypeAdapter(RewardList).validate_python([{"type": kind, **settings}])
    assert config.reasoning == "keep"


@pytest.mark.parametrize("value", ["", "kep", "none", " "])
def test_reward_reasoning_refuses_what_is_no_tag(value: str) -> None:
    with pytest.raises(ValidationError, match="expected auto, keep or a closing tag"):
        TypeAdapter(RewardList).validate_python([{"type": "math", "reasoning": value}])


def test_reward_reasoning_leaves_the_program_behind_it(rollout: MakeRollout) -> None:
    draft, program = "```python\ndef f(x):\n    return x\n```", "```python\ndef f(x):\n    return x + 1\n```"
    text = get_scored_text(rollout(f"<think>Try:\n{draft}\n</think>\nHere:\n{program}"), "auto")
    assert text is not None and extract_code(text, "python") == "def f(x):\n    return x + 1\n"
    given_up = get_scored_text(rollout(f"<think>Try:\n{program}\n</think>\nI give up."), "auto")
    assert given_up == "\nI give up."
