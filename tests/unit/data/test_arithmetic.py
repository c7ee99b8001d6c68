"""The generator of sums."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.config.data import ArithmeticData
from roll.data.arithmetic import ArithmeticPrompts, build_arithmetic_prompts
from roll.errors import DataError


def config(**changes: Any) -> ArithmeticData:
    return ArithmeticData(**{"source": "arithmetic", "reward": "math", **changes})


def uids(prompts: ArithmeticPrompts) -> list[str]:
    return [prompts[i].uid for i in range(len(prompts))]


def test_data_arithmetic_operands_1_to_9_make_57_training_and_24_held_out_pairs_that_are_disjoint() -> None:
    training, held_out = (uids(side) for side in build_arithmetic_prompts(config(), "sums", 0))
    assert (len(training), len(held_out)) == (57, 24)
    assert not set(training) & set(held_out)
    assert set(training) | set(held_out) == {f"sums/{a}+{b}" for a in range(1, 10) for b in range(1, 10)}


def test_data_arithmetic_a_prompt_asks_plainly_and_does_not_tell_its_answer() -> None:
    training, _ = build_arithmetic_prompts(
        config(system_prompt="Be brief.", prompt_template="{prompt} Think."), "sums", 0
    )
    found = next(training[i] for i in range(len(training)) if training[i].uid == "sums/1+3")
    assert [m.text for m in found.messages] == ["Be brief.", "What is 1 + 3? Think."]
    assert found.answer == "4" and not found.metadata


@pytest.mark.parametrize(
    ("operation", "uid", "question", "answer"),
    [
        ("+", "-2+3", "What is -2 + 3?", "1"),
        ("-", "-2-3", "What is -2 - 3?", "-5"),
        ("*", "-2*3", "What is -2 * 3?", "-6"),
    ],
)
def test_data_arithmetic_every_operation_gives_its_result(operation: str, uid: str, question: str, answer: str) -> None:
    training, _ = build_arithmetic_prompts(
        config(min_operand=-2, max_operand=3, operations=[operation], held_out=0), "d", 0
    )
    (prompt,) = [training[i] for i in range(len(training)) if training[i].uid == f"d/{uid}"]
    assert (prompt.messages[-1].text, prompt.answer) == (question, answer)


def test_data_arithmetic_order_and_split_depend_on_the_seed_alone() -> None:
    first, again, other = (uids(build_arithmetic_prompts(config(), "d", seed)[1]) for seed in (3, 3, 4))
    assert first == again != other


@settings(max_examples=60, deadline=None)
@given(
    low=st.integers(-30, 30),
    span=st.integers(2, 12),
    operations=st.lists(st.sampled_from("+-*"), min_size=1, max_size=3, unique=True),
    share=st.floats(0.13, 0.87),
    seed=st.integers(0, 2**31),
)
def test_data_arithmetic_sides_never_share_a_pair_and_together_hold_everything_once(
    low: int, span: int, operations: list[str], share: float, seed: int
) -> None:
    settings_ = config(min_operand=low, max_operand=low + span - 1, operations=operations, held_out=share)
    sides = build_arithmetic_prompts(settings_, "d", seed)
    questions = [[side[i].messages[0].text for i in range(len(side))] for side in sides]
    assert len(sides[1]) == round(span * span * share) * len(operations)
    assert len(set(questions[0] + questions[1])) == sum(map(len, sides)) == span * span * len(operations)
    operands = [{tuple(question.strip("?").split()[2::2]) for question in side} for side in questions]
    assert not operands[0] & operands[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_operand": 1}, "no operand pair .of 1. for evaluation"),
        ({"max_operand": 2, "held_out": 0.99}, "no operand pair .of 4. for training"),
        ({"max_operand": 10_000}, "lower max_operand"),
    ],
)
def test_data_arithmetic_impossible_splits_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        build_arithmetic_prompts(config(**changes), "d", 0)


def test_data_arithmetic_an_operation_named_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="contains duplicate operations"):
        config(operations=["+", "+"])
