"""What we failed of a run's answers is counted, said once, and stops a run that it makes worthless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roll.config.alarms import AlarmsConfig
from roll.pipelines import measures
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.failures import (
    FailureCounts,
    RetryCounter,
    check_failures,
    check_step_failures,
    count_failures,
    describe_failures,
)
from roll.pipelines.learning.state import LearningState
from roll.rollout.lifecycle import RolloutState, Transition
from roll.types import Group, Prompt, PromptDraw, RewardResult, Rollout, RolloutStatus

RIGHT = RewardResult(value=1.0, verdict="correct", correct=True)
WRONG = RewardResult(value=0.0, verdict="wrong", correct=False)
FLOAT = RewardResult(value=0.25, verdict="0.25")
CUT = RewardResult(value=0.0, verdict="unfinished", correct=False)
LATE = RewardResult(value=0.0, verdict="timeout", correct=False, timed_out=("math",))


def group(draw_id: int, *results: RewardResult | str) -> Group:
    """A text is the cause of a rollout that we failed."""
    prompt = Prompt(uid=f"d/{draw_id}", domain="d", messages=())
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(1, np.int32))
    nothing = np.zeros(0, np.int32)
    blank = Rollout(
        draw_id=draw_id, index=0, prompt=prompt, prompt_token_ids=nothing, token_ids=nothing,
        logprobs=np.zeros(0, np.float32), policy_versions=nothing, finish_reason="stop", text="",
    )  # fmt: skip
    rollouts = [
        replace(blank, index=i, status=RolloutStatus.INFRA_ERROR, cause=result)
        if isinstance(result, str)
        else replace(blank, index=i, reward=result)
        for i, result in enumerate(results)
    ]
    return Group(draw=draw, rollouts=tuple(rollouts))


def test_failures_shares_are_of_the_answers_that_a_verifier_was_asked_about() -> None:
    boom = [f"a worker (process {7 + i}) is gone (prompt 'd/{i}')" for i in range(2)]
    groups = [group(0, boom[0], RIGHT, CUT, CUT), group(1, boom[1], LATE, CUT, "other")]
    found = count_failures(groups)
    assert (found.num_judged, found.failed, found.timed_out) == (5, 3, 1)  # three were truncated: nobody looked at them
    assert found.collect_metrics() == {
        "rollout/infra_errors": 3, "rollout/infra_error_share": 0.6, "reward/timeouts": 1, "reward/timeout_share": 0.2
    }  # fmt: skip
    assert describe_failures(found) == (
        "3 of 5 answers got no reward, 2 of them: a worker is gone (first: prompt 'd/0'); "
        "1 of 5 answers exceeded time_limit_s during verification"
    )
    assert describe_failures(count_failures([group(0, RIGHT, CUT)])) == ""


def steps(config: AlarmsConfig, *found: tuple[int, int, int]) -> list[int]:
    """Steps, from 1, at which an alarm goes off for so many answers, failures and time-outs."""
    state, when = LearningState(), []
    for number, (asked, failed, late) in enumerate(found, 1):
        state.step = number
        results = [*["boom"] * failed, *[LATE] * late, *[RIGHT] * (asked - failed - late)]
        if check_step_failures(config, state, [group(0, *results)], is_first_step=number == 1):
            when.append(number)
    return when


@pytest.mark.parametrize("index", [1, 2])
def test_failures_a_first_step_that_failed_altogether_stops_the_run_at_once(index: int) -> None:
    bad = FailureCounts(num_judged=8, **{("failed", "timed_out")[index - 1]: 8})
    if index == 1:
        bad.causes["boom"] = 8
        bad.prompts["boom"] = "d/0"
    (alarm,) = check_failures(AlarmsConfig(), [bad.counts], bad, is_first_step=True)
    assert alarm.stops
    assert alarm.message.startswith("8 of 8 answers ")
    assert check_failures(AlarmsConfig(), [bad.counts], bad, is_first_step=False) == []  # one step is no window


def test_failures_an_outage_stops_the_run_in_its_first_step_and_a_trickle_does_not() -> None:
    good, outage, trickle = (8, 0, 0), (8, 8, 0), (8, 2, 0)
    assert steps(AlarmsConfig(), good, good, good, outage) == [4]  # 8 of 24 is above a quarter
    assert steps(AlarmsConfig(), *[trickle] * 20) == []  # just a quarter
    assert steps(AlarmsConfig(), *[(8, 3, 0)] * 9) == [3, 6, 9]  # whoever goes on is warned again
    assert steps(AlarmsConfig(), (8, 7, 0), good, good, good) == []  # over before the window was full
    assert steps(AlarmsConfig(infra_errors_above=None), *[outage] * 5) == []


def test_failures_time_outs_have_a_threshold_of_their_own() -> None:
    assert steps(AlarmsConfig(), (8, 0, 7), (8, 0, 4), (8, 0, 2)) == [3]  # 13 of 24
    assert steps(AlarmsConfig(), (8, 0, 4), (8, 0, 4), (8, 0, 4)) == []
    assert steps(AlarmsConfig(timeouts_above=None), *[(8, 0, 8)] * 4) == []


def test_failures_who_wants_only_warnings_can_have_them() -> None:
    bad = count_failures([group(0, "boom")])
    (alarm,) = check_failures(AlarmsConfig(stop_on=[]), [bad.counts], bad, is_first_step=True)
    assert not alarm.stops


def test_failures_a_step_without_answers_has_no_mean_reward_and_says_nothing_of_a_missing_signal() -> None:
    groups = [group(0, "boom", "boom")]
    metrics = measures.compute_rollout_metrics(groups)
    assert "reward/mean" not in metrics and "accuracy" not in metrics
    config = AlarmsConfig(patience=1)
    assert check_alarms(config, metrics | {"data/groups_trained": 0.0}, {}) == ({}, [])
    assert check_alarms(config, {"reward/mean": 0.0, "data/groups_trained": 0.0}, {})[1]


def test_failures_an_evaluation_without_answers_measures_nothing() -> None:
    assert measures.compute_evaluation_metrics([group(0, "boom", "boom")]) == {
        "eval/num_answers": 0,
        "eval/infra_errors": 2,
    }


def test_failures_the_score_follows_every_answer_and_accuracy_those_with_a_verdict() -> None:
    mixed = measures.compute_evaluation_metrics([group(0, RIGHT), group(1, FLOAT, FLOAT, FLOAT)])
    assert mixed["eval/accuracy"] == 1.0
    assert mixed["eval/verified_share"] == 0.25
    assert mixed["eval/score"] == (1 + 3 * 0.25) / 4
    decided = measures.compute_evaluation_metrics([group(0, RIGHT, WRONG)])
    assert decided["eval/accuracy"] == decided["eval/score"] == 0.5
    graded = measures.compute_evaluation_metrics([group(0, FLOAT)])
    assert "eval/accuracy" not in graded and graded["eval/score"] == graded["eval/reward"] == 0.25


def test_failures_an_evaluation_says_every_part_of_a_reward_that_has_several() -> None:
    two = [RewardResult(value=1.0, components={"liked": 1.0, "watched": float(n)}) for n in (0, 1)]
    metrics = measures.compute_evaluation_metrics([group(0, *two)])
    assert [v for k, v in metrics.items() if k.endswith("/reward/watched")] == [0.5]
    one = RewardResult(value=1.0, components={"liked": 1.0})
    assert not [k for k in measures.compute_evaluation_metrics([group(0, one)]) if "/reward/" in k]


def test_failures_retries_are_counted_and_the_first_of_a_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    retries = RetryCounter()

    def move(before: Any, after: RolloutState, detail: str = "") -> None:
        retries.on_transition(Transition("train-0.0", before, after, 0.0, detail))

    for _ in range(2):
        move(None, RolloutState.QUEUED)
        move(RolloutState.REWARDING, RolloutState.QUEUED, "boom")
        move(RolloutState.REWARDING, RolloutState.QUEUED, "boom")
        move(RolloutState.REWARDING, RolloutState.INFRA_ERROR, "boom")
    assert [record.getMessage() for record in caplog.records] == ["an answer failed and will be retried: boom"]
    assert retries.collect_metrics() == {"rollout/retries": 4}
    assert retries.collect_metrics() == {"rollout/retries": 0}
    move(RolloutState.REWARDING, RolloutState.INFRA_ERROR, "bang")
    assert caplog.records[-1].getMessage() == "an answer got no reward: bang"
