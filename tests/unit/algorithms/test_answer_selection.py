"""Which rollouts are learnt from where no algorithm says so, and what becomes of every group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from roll.algorithms.answer_selection import (
    Pairing,
    select_answers_in_vocabulary,
    select_best_answers,
    select_pairs,
    select_rollouts_per_group,
)
from roll.types import DrawOutcome, Group, Prompt, PromptDraw, RewardResult, Rollout


def group(draw_id: int, *rewards: float | None, length: int = 2) -> Group:
    prompt = Prompt(uid=f"p/{draw_id}", domain="d", messages=())
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(3, np.int32))
    rollouts = tuple(
        Rollout(
            draw_id=draw_id,
            index=i,
            prompt=prompt,
            prompt_token_ids=draw.token_ids,
            token_ids=np.full(length, i, np.int32),
            logprobs=np.zeros(length, np.float32),
            policy_versions=np.zeros(length, np.int32),
            finish_reason="stop",
            text="",
            reward=None if reward is None else RewardResult(value=reward),
            cause="the engine died" if reward is None else "",
        )
        for i, reward in enumerate(rewards)
    )
    return Group(draw=draw, rollouts=rollouts)


every_answer = partial(select_answers_in_vocabulary, vocab_size=260)


def places(answers: list[tuple[Rollout, ...]] | str) -> list[tuple[int, ...]]:
    assert not isinstance(answers, str)
    return [tuple(rollout.index for rollout in each) for each in answers]


def test_selection_every_answer_is_learnt_from_alone() -> None:
    choice = select_rollouts_per_group([group(0, 1.0, 0.0), group(1, 0.0)], every_answer)
    assert [(r.draw_id, r.index) for r in choice.rollouts] == [(0, 0), (0, 1), (1, 0)]
    assert choice.draw_outcomes == {0: (DrawOutcome.TRAINED, ""), 1: (DrawOutcome.TRAINED, "")}


def test_selection_what_infrastructure_failed_is_never_learnt_from_and_a_group_of_it_has_failed() -> None:
    choice = select_rollouts_per_group([group(0, None, 1.0), group(1, None, None)], every_answer)
    assert [(r.draw_id, r.index) for r in choice.rollouts] == [(0, 1)]
    assert choice.draw_outcomes[1] == (DrawOutcome.FAILED, "the engine died")


def test_selection_a_group_without_a_token_has_failed() -> None:
    assert select_rollouts_per_group([group(0, 1.0, length=0)], every_answer).draw_outcomes[0] == (
        DrawOutcome.FAILED,
        "no rollout has a token",
    )


def test_selection_answers_with_an_id_that_their_teacher_lacks_are_left_out() -> None:
    choose = partial(select_answers_in_vocabulary, vocab_size=2)  # of each answer the ids are its number
    choice = select_rollouts_per_group([group(0, 1.0, 0.0, 1.0, 0.5)], choose)
    assert [(r.draw_id, r.index) for r in choice.rollouts] == [(0, 0), (0, 1)]
    rollouts = group(1, 0.0, 0.0, 0.0).rollouts[2:]
    reason = "every answer has a token id of 2 or more, which is not in its teacher's vocabulary"
    assert choose(rollouts) == reason


def test_selection_the_best_are_kept_in_their_order_and_of_equal_ones_the_first() -> None:
    rollouts = group(0, 0.5, 1.0, 0.2, 1.0, 1.0).rollouts
    assert places(select_best_answers(rollouts, num_answers=2, min_reward=1.0)) == [(1,), (3,)]
    assert places(select_best_answers(rollouts, num_answers=9, min_reward=0.5)) == [(0,), (1,), (3,), (4,)]


def test_selection_a_group_without_a_good_answer_is_filtered_and_says_why() -> None:
    choice = select_rollouts_per_group(
        [group(0, 0.2, 0.4)], partial(select_best_answers, num_answers=1, min_reward=0.5)
    )
    assert choice.rollouts == ()
    assert choice.draw_outcomes == {0: (DrawOutcome.FILTERED, "the best reward 0.4 is below 0.5")}


def test_selection_a_pair_is_the_first_best_and_the_first_worst() -> None:
    rollouts = group(0, 0.5, 0.0, 1.0, 0.0, 1.0).rollouts
    assert places(select_pairs(rollouts, pairing="best_worst")) == [(2, 1)]


def test_selection_all_pairs_are_those_whose_rewards_differ_enough() -> None:
    rollouts = group(0, 0.0, 1.0, 0.75, 1.0).rollouts
    assert set(places(select_pairs(rollouts, pairing="all"))) == {(1, 0), (3, 0), (2, 0), (1, 2), (3, 2)}
    assert set(places(select_pairs(rollouts, pairing="all", min_difference=0.5))) == {(1, 0), (3, 0), (2, 0)}


@pytest.mark.parametrize("pairing", ["best_worst", "all"])
def test_selection_rewards_that_are_equal_or_too_near_make_no_pair(pairing: str) -> None:
    assert select_pairs(group(0, 1.0, 1.0).rollouts, pairing=pairing) == "zero variance: every reward is 1"
    why = select_pairs(group(0, 1.0, 0.75).rollouts, pairing=pairing, min_difference=0.5)
    assert why == "the rewards differ by 0.25, less than 0.5"


def test_selection_one_answer_alone_is_no_pair() -> None:
    one = replace(group(0, 1.0), rollouts=group(0, 1.0).rollouts[:1])
    assert isinstance(select_pairs(one.scored_rollouts, pairing="best_worst"), str)


def test_selection_answers_of_the_same_tokens_are_no_pair_whatever_a_judge_says_of_them() -> None:
    better, worse, other = group(0, 1.0, 0.0, 0.5).rollouts
    worse = replace(worse, token_ids=better.token_ids)
    assert (
        select_pairs([better, worse], pairing="best_worst") == "the chosen and rejected answers have identical tokens"
    )
    assert places(select_pairs([better, worse, other], pairing="all")) == [(0, 2), (2, 1)]


@pytest.mark.parametrize("pairing", ["best_worst", "all"])
def test_selection_pairs_that_differ_by_exactly_the_min_difference_are_kept(pairing: Pairing) -> None:
    rollouts = group(0, 1.0, 0.5).rollouts
    assert places(select_pairs(rollouts, pairing=pairing, min_difference=0.5)) == [(0, 1)]
    assert isinstance(select_pairs(rollouts, pairing=pairing, min_difference=np.nextafter(0.5, 1.0)), str)


def test_selection_pairs_of_equal_rewards_are_left_out_also_without_a_min_difference() -> None:
    rollouts = group(0, 1.0, 0.0, 1.0, 0.0).rollouts
    assert set(places(select_pairs(rollouts, pairing="all", min_difference=0.0))) == {(0, 1), (0, 3), (2, 1), (2, 3)}
