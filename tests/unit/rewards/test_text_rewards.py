"""Short answers, repetition and length."""

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
from roll.config.rewards import RewardList, expand_rewards
from roll.errors import UnscorableError
from roll.protocols import Reward
from roll.rewards import build_reward
from roll.rewards.final_answer import find_last_tagged
from roll.rewards.short_answer import compute_f1, is_exact_match, parse_references
from roll.rewards.simple import compute_overlength_penalty, compute_repeated_fraction
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]


def build(pool: LocalWorkerPool, *entries: Any) -> Reward:
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(list(entries))), pool)


def test_reward_text_words_are_compared_without_case_articles_and_punctuation() -> None:
    assert is_exact_match("The Eiffel-Tower!", "eiffel tower")
    assert not is_exact_match("tower eiffel", "eiffel tower")
    assert is_exact_match("\u201cRock \u2019n\u2019 roll\u201d\u2026", "rock 'n' roll")  # as models write them
    # 2 common words of 3 and 2: precision 2/3, recall 1, F1 = 2 x 2/3 / (5/3) = 0.8
    assert compute_f1("in Paris France", "paris france") == pytest.approx(0.8)
    assert compute_f1("", "paris") == 0.0
    assert (
        compute_f1("the", "a") == compute_f1("", "A") == compute_f1("!", "A") == compute_f1("-", "+") == 0.0
    )  # nothing is not any article or sign
    assert compute_f1("A.", "a") == compute_f1("+", "+") == compute_f1("", "") == 1.0


@given(st.text(max_size=40), st.text(max_size=40))
def test_reward_text_f1_is_symmetric_and_1_exactly_for_equal_bags_of_words(a: str, b: str) -> None:
    assert compute_f1(a, b) == compute_f1(b, a)
    assert 0.0 <= compute_f1(a, b) <= 1.0
    assert compute_f1(a, a) == 1.0


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
def test_reward_text_the_last_tagged_answer_counts(text: str, inside: str | None) -> None:
    assert find_last_tagged(text) == inside


def test_reward_text_a_million_open_tags_hold_nobody_up() -> None:
    started = time.process_time()
    assert find_last_tagged("<answer>" * 200_000) is None
    assert compute_f1("<answer>" * 200_000, "7") == 0.0
    assert time.process_time() - started < 5


async def test_reward_text_the_best_of_several_references_counts(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    made = rollout("<answer>NYC</answer>", "New York City")
    aliased = replace(made, prompt=replace(made.prompt, metadata={"aliases": ["NYC", "Big Apple"]}))
    plain, several = build(pool, "short_answer"), build(pool, {"type": "short_answer", "references_key": "aliases"})
    assert (await plain(made)).value == 0.0
    found = await several(aliased)
    assert (found.value, found.correct, found.verdict) == (1.0, True, "correct")


@pytest.mark.parametrize(
    ("cell", "references"),
    [
        (None, []),
        (float("nan"), []),
        ("Paris, France", ["Paris, France"]),
        (["NYC", None, "Big Apple", "NYC"], ["NYC", "Big Apple"]),
        (np.array(["NYC"]), ["NYC"]),
        ('["NYC", "Big Apple"]', ["NYC", "Big Apple"]),
        ("['NYC', 'Big Apple']", ["NYC", "Big Apple"]),  # as pandas writes lists to CSV
        ("[sic] Paris", ["[sic] Paris"]),
        ({"text": ["NYC"], "answer_start": [3]}, ["NYC"]),  # SQuAD
        ({"value": "NYC", "aliases": ["Big Apple"], "type": "Entity"}, ["NYC", "Big Apple"]),  # TriviaQA
        ({"text": np.array([], dtype=object)}, []),
        ([{"text": "NYC"}, {"text": "Big Apple"}], ["NYC", "Big Apple"]),
        (1912, ["1912"]),
        ([1912, 19.5], ["1912", "19.5"]),
    ],
)
def test_reward_text_short_answer_reads_references_as_data_sets_write_them(cell: Any, references: list[str]) -> None:
    assert parse_references(cell) == references


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ({"label": "NYC"}, "expected one of the keys text, value.* got the keys 'label'"),
        ([object()], "expected a string, a number, a list of these"),
        ([[[[[["deep"]]]]]], "nested more than 4 levels"),
    ],
)
async def test_reward_text_short_answer_refuses_references_that_it_cannot_read(
    pool: LocalWorkerPool, rollout: MakeRollout, cell: Any, problem: str
) -> None:
    reward = build(pool, {"type": "short_answer", "references_key": "aliases"})
    with pytest.raises(UnscorableError, match=rf"column 'aliases' has no valid.*{problem}"):
        await reward(rollout("NYC", "NYC", metadata={"aliases": cell}))


async def test_reward_text_short_answer_without_any_reference_is_refused(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    reward = build(pool, {"type": "short_answer", "references_key": "aliases"})
    for metadata in ({"aliases": None}, {"aliases": []}, {"alias": ["NYC"]}):
        with pytest.raises(UnscorableError, match=r"no reference answer.*column 'aliases' are empty \(columns: 'alias"):
            await reward(rollout("NYC", "", metadata=metadata))
    assert (await reward(rollout("NYC", "NYC", metadata={"aliases": None}))).value == 1.0
    assert (await reward(rollout("I", "Paris", metadata={"aliases": "Paris, France"}))).value == 0.0


def test_reward_text_repeated_ngrams_by_hand() -> None:
    assert compute_repeated_fraction([1, 2, 1, 2, 1, 2], 2) == pytest.approx(
        1 - 2 / 5
    )  # 12 21 12 21 12: two kinds of five
    assert compute_repeated_fraction([1, 2, 3], 2) == 0.0
    assert compute_repeated_fraction([1], 2) == 0.0


def test_reward_text_overlength_is_linear_between_its_limits() -> None:
    assert [compute_overlength_penalty(n, 10, 20) for n in (5, 10, 15, 20, 99)] == [0.0, 0.0, 0.5, 1.0, 1.0]


async def test_reward_text_penalties_lower_the_reward_and_decide_nothing(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
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


def test_reward_text_a_length_penalty_without_room_is_refused() -> None:
    with pytest.raises(ValidationError, match="full_tokens 5 must exceed free_tokens 5"):
        TypeAdapter(RewardList).validate_python([{"type": "length", "free_tokens": 5, "full_tokens": 5}])
