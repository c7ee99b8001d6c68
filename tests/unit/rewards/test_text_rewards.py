"""Multiple choice, short answers, repetition and length."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RewardList, as_reward_list
from roll.protocols import Reward
from roll.rewards import build_reward
from roll.rewards.choice import chosen_letter
from roll.rewards.final_answer import last_tagged
from roll.rewards.short_answer import exact_match, f1
from roll.rewards.simple import overlength, repeated_share
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]


def build(pool: LocalWorkerPool, *entries: Any) -> Reward:
    return build_reward(TypeAdapter(RewardList).validate_python(as_reward_list(list(entries))), pool)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(C)", "C"),
        ("**D**", "D"),
        (r"So \boxed{B}.", "B"),
        (r"\boxed{\text{A}}", "A"),
        ("The answer is C.", "C"),
        ("the answer is (b)", "B"),
        (r"\boxed{A, B, C, D}", None),  # who names all letters has chosen none, or one of them
        ("A B C D", None),
        ("Answer: ABCD", None),
        ("(A)(B)(C)(D)", "D"),
        ("The answer is A, B, C or D", "A"),
        ("Answer: D because A and B are wrong", "D"),
        ("A is tempting. I choose option B.", "B"),
        ("A) no\nB) yes\n\nB", "B"),
        ("Not (A), rather (C)", "C"),
        ("Thinking...\nE\n", "E"),
        ("A dog is an animal.", None),
        ("", None),
        (r"\boxed{7}", None),
        ("The answer is F", None),
        (r"\boxed{(B) 5}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{\textbf{(B) }5}", "B"),
        (r"\boxed{A dog}", None),
        ("**Answer:** B", "B"),
        ("**Answer: (D)**", "D"),
        ("<answer>B</answer>", "B"),
        ("<answer>(C) Paris, A's rival</answer>", "C"),
        ("<answer> D. four </answer>", "D"),
        ("So it's B.", "B"),
        ("It is a dog", None),
        (r"The final answer is \(B\)", "B"),
        ("It must be (B), not (A).", "B"),
        ("The best choice is D, rather than (A).", "D"),
        ("(B), as opposed to what was said, not (A)", "B"),
        ("The answer is a bit unclear.", None),
        ("Answer: b", "B"),
    ],
)
def test_the_letter_an_answer_settles_on(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "ABCDE") == letter


@pytest.mark.parametrize(
    "piece",
    [
        "\n",
        " ",
        "(",
        "*",
        "answer ",
        "answer * ",
        "it is ",
        "\\boxed{",
        "<answer>",
        "A\n",
        "(A)",
        "not (A) ",
        ": ",
        "A) ",
    ],
)
def test_the_letter_is_found_in_linear_time(piece: str) -> None:
    def seconds(text: str) -> float:
        chosen_letter(text, "ABCDE")
        started = time.process_time()
        chosen_letter(text, "ABCDE")
        return time.process_time() - started

    # 20,000 characters, all that is looked at, take some 10 ms; 19,000 line ends once took 16.5 s
    assert seconds((piece * 20_000)[:20_000]) < 5


async def test_a_choice_without_a_letter_is_no_answer(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward = build(pool, "choice")
    right, wrong, none = [await reward(rollout(text, "B")) for text in ("The answer is B", "A", "I do not know.")]
    assert [(r.value, r.correct, r.verdict) for r in (right, wrong, none)] == [
        (1.0, True, "correct"),
        (0.0, False, "wrong"),
        (0.0, False, "no answer"),
    ]


def test_words_are_compared_without_case_articles_and_punctuation() -> None:
    assert exact_match("The Eiffel-Tower!", "eiffel tower")
    assert not exact_match("tower eiffel", "eiffel tower")
    # 2 common words of 3 and 2: precision 2/3, recall 1, F1 = 2 x 2/3 / (5/3) = 0.8
    assert f1("in Paris France", "paris france") == pytest.approx(0.8)
    assert f1("", "paris") == 0.0
    assert f1("the", "a") == f1("", "A") == f1("!", "A") == f1("-", "+") == 0.0  # nothing is not any article or sign
    assert f1("A.", "a") == f1("+", "+") == f1("", "") == 1.0


@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_symmetric_and_1_exactly_for_equal_bags_of_words(a: str, b: str) -> None:
    assert f1(a, b) == f1(b, a)
    assert 0.0 <= f1(a, b) <= 1.0
    assert f1(a, a) == 1.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>a</answer> <Answer> b </ANSWER>", " b "),
        ("<answer>a<answer>b</answer>", "b"),
        ("<answer>a</answer><answer>b", "a"),
        ("</answer>a<answer>", None),
        ("a", None),
        ("\u0130 <answer>b</answer>", "b"),  # a capital whose small letter is two characters
    ],
)
def test_the_last_tagged_answer_counts(text: str, inside: str | None) -> None:
    assert last_tagged(text) == inside


def test_a_million_open_tags_hold_nobody_up() -> None:
    started = time.process_time()
    assert last_tagged("<answer>" * 200_000) is None
    assert chosen_letter("(" * 1_000_000, "ABCDE") is None
    assert f1("<answer>" * 200_000, "7") == 0.0
    assert time.process_time() - started < 1.0


async def test_the_best_of_several_references_counts(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    made = rollout("<answer>NYC</answer>", "New York City")
    aliased = replace(made, prompt=replace(made.prompt, metadata={"aliases": ["NYC", "Big Apple"]}))
    plain, several = build(pool, "short_answer"), build(pool, {"type": "short_answer", "references_key": "aliases"})
    assert (await plain(made)).value == 0.0
    found = await several(aliased)
    assert (found.value, found.correct, found.verdict) == (1.0, True, "correct")


def test_repeated_ngrams_by_hand() -> None:
    assert repeated_share([1, 2, 1, 2, 1, 2], 2) == pytest.approx(1 - 2 / 5)  # 12 21 12 21 12: two kinds of five
    assert repeated_share([1, 2, 3], 2) == 0.0
    assert repeated_share([1], 2) == 0.0


def test_overlength_is_linear_between_its_limits() -> None:
    assert [overlength(n, 10, 20) for n in (5, 10, 15, 20, 99)] == [0.0, 0.0, 0.5, 1.0, 1.0]


async def test_penalties_lower_the_reward_and_decide_nothing(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    made = replace(rollout("7", "7"), token_ids=np.array([5] * 15, np.int32))
    reward = build(
        pool,
        "exact",
        {"type": "length", "free_tokens": 10, "full_tokens": 20, "weight": 0.2},
        {"type": "repetition", "ngram_size": 1, "tolerance": 0.0, "weight": 0.3},
    )
    found = await reward(made)
    # exact 1, length -(15 - 10)/10 x 0.2 = -0.1, repetition -(1 - 1/15) x 0.3 = -0.28
    assert found.value == pytest.approx(1 - 0.1 - 0.28)
    assert found.correct is True


def test_a_length_penalty_without_room_is_refused() -> None:
    with pytest.raises(ValidationError, match="full_tokens 5 must exceed free_tokens 5"):
        TypeAdapter(RewardList).validate_python([{"type": "length", "free_tokens": 5, "full_tokens": 5}])
