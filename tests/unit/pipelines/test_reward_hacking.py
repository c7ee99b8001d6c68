"""Marks of a hacked reward, by hand, and the alarms that they raise."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st

from roll.algorithms.hacking import (
    compute_hacking_metrics,
    compute_repeated_text_fraction,
    compute_shared_ngram_fraction,
)
from roll.config.alarms import AlarmsConfig
from roll.pipelines.learning.alarms import Alarm, check_alarms
from roll.types import Group, Prompt, PromptDraw, RewardResult, Rollout

LONG = [f"word{i}" for i in range(14)]
OTHER = [f"other{i}" for i in range(15)]


def group(number: int, texts: list[str], **results: object) -> Group:
    """One prompt's answers; token ids are the words' lengths."""
    prompt = Prompt(uid=f"d/{number}", domain="d", messages=())
    rollouts = tuple(
        Rollout(
            draw_id=number,
            index=i,
            prompt=prompt,
            prompt_token_ids=np.zeros(1, np.int32),
            token_ids=np.array([len(word) for word in text.split()], np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.zeros(1, np.int32),
            finish_reason="stop",
            text=text,
            reward=RewardResult(**{"value": float(i), **results}),  # type: ignore[arg-type]
        )
        for i, text in enumerate(texts)
    )
    return Group(draw=PromptDraw(draw_id=number, prompt=prompt, token_ids=np.zeros(1, np.int32)), rollouts=rollouts)


def test_reward_hacking_texts_count_as_repeated_where_another_prompt_got_them_too() -> None:
    # a twice within one prompt is no repetition; to d/1 and d/2 it is; short answers are left out
    answers = [("d/0", OTHER), ("d/0", OTHER), ("d/1", LONG), ("d/2", LONG), ("d/3", ["7"]), ("d/4", ["7"])]
    assert compute_repeated_text_fraction(answers) == pytest.approx(2 / 4)
    assert compute_repeated_text_fraction([("d/0", ["7"]), ("d/1", ["7"])]) == 0.0
    assert compute_repeated_text_fraction([]) == 0.0


def test_reward_hacking_ngrams_count_as_shared_where_half_of_the_prompts_have_them() -> None:
    # LONG has 14 words: 7 runs of eight; OTHER has 15 words: 8 runs. Of four prompts, two is half.
    two = [("d/0", LONG), ("d/1", LONG), ("d/2", OTHER), ("d/3", ["x"])]
    assert compute_shared_ngram_fraction(two) == pytest.approx(14 / 22)
    one = [("d/0", LONG), ("d/0", LONG), ("d/2", OTHER), ("d/3", ["x"])]
    assert compute_shared_ngram_fraction(one) == 0.0
    five = [*two, ("d/4", ["y"])]  # now half of five is three
    assert compute_shared_ngram_fraction(five) == 0.0


@drawing(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from("xy"), max_size=12)), max_size=8))
def test_reward_hacking_shared_ngrams_are_those_of_sets(answers: list[tuple[str, list[str]]]) -> None:
    runs = [(uid, tuple(words[i : i + 8])) for uid, words in answers for i in range(len(words) - 7)]
    enough = max(2, math.ceil(len({uid for uid, _ in answers}) / 2))
    shared = [run for _, run in runs if len({uid for uid, other in runs if other == run}) >= enough]
    assert compute_shared_ngram_fraction(answers) == pytest.approx(len(shared) / len(runs) if runs else 0.0)


def test_reward_hacking_a_long_answer_costs_no_more_than_its_bound() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 100_000).astype(np.int32)
    groups = [group(number, ["a b " * 25_000]) for number in range(64)]
    groups = [replace(g, rollouts=(replace(g.rollouts[0], token_ids=tokens),)) for g in groups]
    started = time.thread_time()
    assert compute_hacking_metrics(groups, [])["hacking/repeated_text_share"] == 1.0
    assert time.thread_time() - started < 0.5  # of all tokens as tuples it took 5 s


def test_reward_hacking_a_loop_that_an_answer_ends_in_is_found_however_it_began() -> None:
    tokens = np.concatenate((np.arange(50_000), np.tile([1, 2, 3], 2_000))).astype(np.int32)
    found = group(0, ["a"])
    rollout = replace(found.rollouts[0], token_ids=tokens)
    assert compute_hacking_metrics([replace(found, rollouts=(rollout,))], [])["hacking/self_repetition_share"] == 1.0


def test_reward_hacking_a_steps_figures_by_hand() -> None:
    groups = [group(0, ["a", "bb bb bb bb bb bb bb"]), group(1, ["a b c", "a bb ccc dddd eeeee"])]
    found = compute_hacking_metrics(groups, [2.0, 2.0, 2.0, 2.0, 2.0])
    # lengths 1, 7, 3, 5: mean 4, twice that of the first steps; of four answers one repeats its only run of four
    assert found["hacking/length_ratio"] == 2.0
    assert found["hacking/self_repetition_share"] == 0.25
    # rewards 0, 1, 0, 1; deviations -3, 3, -1, 1 and -.5, .5, -.5, .5: 4 / sqrt(20 x 1)
    assert found["hacking/length_reward_correlation"] == pytest.approx(4 / 20**0.5)
    assert "hacking/disagreement_share" not in found
    assert "hacking/length_ratio" not in compute_hacking_metrics(groups, [2.0])
    assert compute_hacking_metrics([], []) == {}


def test_reward_hacking_components_disagree_where_one_says_right_and_another_wrong() -> None:
    groups = [
        group(0, ["a"], decisions={"math": True, "judge": False}),
        group(1, ["a"], decisions={"math": True, "judge": True}),
        group(2, ["a"], decisions={"math": False, "judge": False}),
        group(3, ["a"], decisions={"math": True}),  # nobody to disagree with
    ]
    assert compute_hacking_metrics(groups, [])["hacking/disagreement_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("metric", "value", "name", "words"),
    [
        (
            "hacking/repeated_text_share",
            0.6,
            "repeated_text_above",
            "60% of longer answers are identical to an answer to another prompt",
        ),
        ("hacking/shared_ngram_share", 0.6, "shared_ngrams_above", "60% of the 8-grams of answers"),
        ("hacking/self_repetition_share", 0.6, "self_repetition_above", "60% of answers consist mostly of repetitions"),
        (
            "hacking/disagreement_share",
            0.6,
            "disagreement_above",
            "60% of answers are correct for one reward component",
        ),
        ("rollout/unfinished_share", 0.96, "unfinished_above", "a truncated answer scores 0"),
    ],
)
def test_reward_hacking_each_can_warn_or_stop(metric: str, value: float, name: str, words: str) -> None:
    once = {"patience": 1}
    for settings, stops in (({}, False), ({"stop_on": [name]}, True), ({"action": "stop"}, True)):
        config = AlarmsConfig.model_validate({**once, **settings})
        counts, alarms = check_alarms(config, {metric: value}, {})
        assert counts == {name: 1}
        assert [alarm.stops for alarm in alarms] == [stops]
        assert words in alarms[0].message and f"alarms.{name}" in alarms[0].message
    assert check_alarms(AlarmsConfig.model_validate(once), {metric: 0.4}, {}) == ({}, [])
    off = AlarmsConfig.model_validate({**once, name: None})
    assert check_alarms(off, {metric: value}, {}) == ({}, [])


def test_reward_hacking_length_may_drift_both_ways_and_only_where_asked_about() -> None:
    config = AlarmsConfig(patience=1, length_drift_above=3.0)
    for ratio, words in ((4.0, "4.0 times longer"), (0.2, "5.0 times shorter")):
        counts, alarms = check_alarms(config, {"hacking/length_ratio": ratio}, {})
        assert counts == {"length_drift_above": 1} and words in alarms[0].message
    for ratio in (3.0, 1.0, 1 / 3):
        assert check_alarms(config, {"hacking/length_ratio": ratio}, {}) == ({}, [])
    assert check_alarms(AlarmsConfig(patience=1), {"hacking/length_ratio": 9.0}, {}) == ({}, [])
    assert "times shorter" in check_alarms(config, {"hacking/length_ratio": 0.0}, {})[1][0].message


def test_reward_hacking_an_alarm_goes_off_once_it_lasted() -> None:
    config = AlarmsConfig(patience=2)
    bad = {"hacking/repeated_text_share": 1.0}
    counts, alarms = check_alarms(config, bad, {})
    assert alarms == []
    counts, alarms = check_alarms(config, bad, counts)
    assert [type(alarm) for alarm in alarms] == [Alarm] and "2 consecutive steps" in alarms[0].message
    counts, alarms = check_alarms(config, bad, counts)
    assert alarms == [] and counts == {"repeated_text_above": 3}
