"""Which rollouts are trained, with which advantage, and what the ledger says of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roll.algorithms import selection
from roll.algorithms.rewards import ShapedRollout, shape_rollout
from roll.algorithms.selection import Selection, select_training_rollouts
from roll.algorithms.token_weights import add_advantages
from roll.config.algorithm import AlgorithmConfig
from roll.data.samples import build_batch
from roll.pipelines.online.boundary import record_draw_outcomes
from roll.rollout import DataLedger
from roll.types import DrawOutcome, Group, Prompt, PromptDraw, RewardResult, Rollout, RolloutStatus, Turn

GRPO = AlgorithmConfig()


def select(groups: list[Group], algorithm: AlgorithmConfig) -> Selection:
    """With answers of at most 8 tokens."""
    return select_training_rollouts(groups, algorithm, max_new_tokens=8)


def advantages(chosen: Selection, algorithm: AlgorithmConfig = GRPO) -> dict[str, list[float]]:
    """Of the answers' tokens, by rollout."""
    batch = add_advantages(build_batch(chosen.rollouts, temperature=1.0, max_new_tokens=8), chosen, algorithm)
    return {s.sample_id: s.advantages[s.loss_mask].tolist() for s in batch.samples}


def group(draw_id: int, rewards: list[float | None], length: int = 2) -> Group:
    """A group with these rewards; `None` stands for a rollout that infrastructure failed."""
    prompt = Prompt(uid=f"d/{draw_id}", domain="d", messages=())
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(3, np.int32))
    rollouts = [
        Rollout(
            draw_id=draw_id,
            index=i,
            prompt=prompt,
            prompt_token_ids=draw.token_ids,
            token_ids=np.zeros(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            policy_versions=np.zeros(length, np.int32),
            finish_reason="stop",
            text="",
            reward=None if value is None else RewardResult(value=value),
            status=RolloutStatus.INFRA_ERROR if value is None else RolloutStatus.COMPLETED,
            cause="engine lost" if value is None else "",
        )
        for i, value in enumerate(rewards)
    ]
    return Group(draw=draw, rollouts=tuple(rollouts))


def test_learning_rewards_one_and_zero_get_opposite_advantages() -> None:
    chosen = select([group(0, [1.0, 0.0])], GRPO)
    # mean 0.5, unbiased standard deviation 1/sqrt(2): (1 - 0.5) / 0.70711 = 0.70711
    found = advantages(chosen)
    assert found["0.0"] == pytest.approx([0.70711] * 2, abs=1e-4)
    assert found["0.1"] == pytest.approx([-0.70711] * 2, abs=1e-4)


def test_learning_a_group_of_equal_rewards_is_filtered_and_counted() -> None:
    chosen = select([group(0, [1.0, 1.0]), group(1, [0.0, 1.0])], GRPO)
    assert {r.draw_id for r in chosen.rollouts} == {1}
    assert chosen.draw_outcomes[0] == (DrawOutcome.FILTERED, "zero variance: every reward is 1")
    assert sorted(outcome for outcome, _ in chosen.draw_outcomes.values()) == [
        DrawOutcome.FILTERED,
        DrawOutcome.TRAINED,
    ]


def test_learning_equal_groups_are_trained_where_the_filter_is_off() -> None:
    algorithm = AlgorithmConfig.model_validate({"filters": {"skip_zero_variance": False}})
    chosen = select([group(0, [1.0, 1.0])], algorithm)
    assert advantages(chosen, algorithm) == {"0.0": [0.0, 0.0], "0.1": [0.0, 0.0]}


def test_learning_gigpo_learns_from_two_rollouts_that_both_win_one_of_them_sooner() -> None:
    won = group(0, [1.0, 1.0], length=2)
    turns = [(Turn(start=0, end=2, reward=1.0, state="s"),),
             (Turn(start=0, end=1, state="s"), Turn(start=1, end=2, reward=1.0, state="t"))]  # fmt: skip
    won = replace(won, rollouts=tuple(replace(r, turns=own) for r, own in zip(won.rollouts, turns, strict=True)))
    algorithm = AlgorithmConfig(type="gi_gpo")
    chosen = select([won], algorithm)
    assert chosen.draw_outcomes[0][0] is DrawOutcome.TRAINED
    # equal totals: no episode advantage. In state s they have 1 and 0.95 to come: 0.025 / (0.05 / sqrt 2) = 0.7071
    found = advantages(chosen, algorithm)
    assert found["0.0"] == pytest.approx([0.7071, 0.7071], abs=1e-4)
    assert found["0.1"] == pytest.approx([-0.7071, 0.0], abs=1e-4)


def test_learning_what_infrastructure_failed_is_in_no_baseline() -> None:
    with_failure = select([group(0, [1.0, None, 0.0])], GRPO)
    without = select([group(0, [1.0, 0.0])], GRPO)
    assert sorted(advantages(with_failure).values()) == sorted(advantages(without).values())
    assert "0.1" not in advantages(with_failure)


def test_learning_a_group_in_which_all_failed_has_failed_with_its_cause() -> None:
    chosen = select([group(0, [None, None])], GRPO)
    assert chosen.rollouts == ()
    assert chosen.draw_outcomes == {0: (DrawOutcome.FAILED, "engine lost")}


def test_learning_a_rollouts_reward_is_shaped_once_whatever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def shape(rollout: Rollout, **settings: Any) -> ShapedRollout:
        asked.append(rollout.sample_id)
        return shape_rollout(rollout, **settings)

    monkeypatch.setattr(selection, "shape_rollout", shape)
    filters = {"keep": "extremes", "keep_num": 1, "top_variance": 0.5, "min_std": 0.1}
    algorithm = AlgorithmConfig.model_validate({"filters": filters, "reward": {"clip": 2.0}})
    chosen = select([group(0, [1.0, 0.0, 0.5]), group(1, [0.4, 0.0])], algorithm)
    assert [r.sample_id for r in chosen.rollouts] == ["0.0", "0.1"]
    assert asked == ["0.0", "0.1", "0.2", "1.0", "1.1"]


def test_learning_every_draw_gets_a_fate_in_the_ledger() -> None:
    groups = [group(0, [1.0, 0.0]), group(1, [0.0, 0.0]), group(2, [None])]
    ledger = DataLedger()
    ledger.record_draws([g.draw for g in groups], step=1)
    record_draw_outcomes(ledger, select(groups, GRPO).draw_outcomes, step=1)
    assert [entry.outcome for entry in ledger] == [DrawOutcome.TRAINED, DrawOutcome.FILTERED, DrawOutcome.FAILED]
    assert ledger.list_in_flight() == []


@pytest.mark.parametrize(
    ("finish_reason", "verdict", "expected"),
    [
        ("stop", "", 1.0),
        ("length", "", 0.7),
        ("context", "", 0.7),
        ("stop", "no answer", 0.7),
        ("length", "wrong", 0.7),
    ],
)
def test_learning_format_penalty_is_paid_by_an_answer_that_did_not_end(
    finish_reason: Any, verdict: str, expected: float
) -> None:
    algorithm = AlgorithmConfig.model_validate({"reward": {"format_penalty": 0.3}})
    rollout = group(0, [1.0]).rollouts[0]
    cut = replace(rollout, finish_reason=finish_reason, reward=RewardResult(value=1.0, verdict=verdict))
    assert shape_rollout(cut, algorithm, max_new_tokens=8).episode.total == pytest.approx(expected)


def test_learning_top_variance_is_of_what_groups_are_judged_by() -> None:
    """By accuracy group 0 varies and group 1 does not; by the reward that is trained it is the other way round."""
    groups = [group(0, [0.5, 0.4]), group(1, [9.0, -9.0])]
    verdicts = [(True, False), (True, True)]
    judged = [
        replace(g, rollouts=tuple(
            replace(r, reward=replace(r.reward, correct=correct))
            for r, correct in zip(g.rollouts, own, strict=True) if r.reward is not None
        ))
        for g, own in zip(groups, verdicts, strict=True)
    ]  # fmt: skip
    filters = {"metric": "accuracy", "top_variance": 0.5, "skip_zero_variance": False}
    chosen = select(judged, AlgorithmConfig.model_validate({"filters": filters}))
    assert {draw_id: outcome for draw_id, (outcome, _) in chosen.draw_outcomes.items()} == {
        0: DrawOutcome.TRAINED,
        1: DrawOutcome.FILTERED,
    }
    by_reward = AlgorithmConfig.model_validate({"filters": {**filters, "metric": "reward"}})
    assert {d: outcome for d, (outcome, _) in select(judged, by_reward).draw_outcomes.items()} == {
        0: DrawOutcome.FILTERED,
        1: DrawOutcome.TRAINED,
    }


def test_learning_difficulty_weights_of_mean_rewards_outside_0_and_1_are_those_of_the_bounds() -> None:
    """Without verdicts the accuracy is the mean reward: 3, -2 and 0.5 count as 1, 0 and 0.5."""
    algorithm = AlgorithmConfig.model_validate({
        "weights": {"difficulty": True}, "advantage": {"mean": "none", "std": "none"},
    })  # fmt: skip
    chosen = select([group(0, [4.0, 2.0]), group(1, [-1.0, -3.0]), group(2, [1.0, 0.0])], algorithm)
    assert chosen.accuracies == {0: 3.0, 1: -2.0, 2: 0.5}
    found = advantages(chosen, algorithm)
    # 0.5 + 1.5 (1 - accuracy): 0.5, 2 and 1.25, whose mean is 1.25
    expected = {"0.0": 4 * 0.4, "0.1": 2 * 0.4, "1.0": -1 * 1.6, "1.1": -3 * 1.6, "2.0": 1.0, "2.1": 0.0}
    assert {name: value[0] for name, value in found.items()} == pytest.approx(expected)
