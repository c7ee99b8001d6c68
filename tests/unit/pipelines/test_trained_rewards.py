"""Filters see the reward that is trained, limits are a prompt's own, and a KL penalty comes before the baseline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.aggregate import compute_aggregation_weights
from roll.algorithms.minibatches import select_critic_batch
from roll.algorithms.rewards import compute_filter_value_range, shape_rollout
from roll.algorithms.selection import Selection, build_early_stop_predicate, select_training_rollouts
from roll.algorithms.token_weights import add_advantages, compute_kl_token_rewards
from roll.config.algorithm import AlgorithmConfig
from roll.config.pipelines.rlvr import RLVRConfig
from roll.data.samples import build_batch
from roll.pipelines.reinforcement.objective import ReinforcementObjective
from roll.types import DrawOutcome, Group, LossInputs, Prompt, PromptDraw, RewardResult, Rollout, Turn

MAX_LENGTH = 8
MALFORMED: dict[str, Any] = {"reward": {"format_penalty": 0.5}}


def group(draw_id: int, *rewards: RewardResult, length: int = 2, turns: int = 1, domain: str = "d") -> Group:
    prompt = Prompt(uid=f"{domain}/{draw_id}", domain=domain, messages=(), turns=turns)
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(3, np.int32))
    rollouts = tuple(
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
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    return Group(draw=draw, rollouts=rollouts)


def valued(*values: float) -> tuple[RewardResult, ...]:
    return tuple(RewardResult(value=value) for value in values)


def algorithm_of(name: str, **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"type": name, **keys})


def advantages(groups: list[Group], algorithm: AlgorithmConfig, kl: dict[str, float] | None = None) -> dict[str, float]:
    """Of every trained rollout the one value of its tokens.

    Args:
        groups: of the step.
        algorithm: its settings.
        kl: by rollout, log-ratio of policy to reference at each of its tokens.
    """
    selection = select_training_rollouts(groups, algorithm, max_new_tokens=MAX_LENGTH)
    batch = build_batch(selection.rollouts, temperature=1.0, max_new_tokens=MAX_LENGTH)
    penalties = []
    if kl is not None:
        old = [np.full(len(s), kl[s.sample_id], np.float32) for s in batch.samples]
        ref = [np.zeros(len(s), np.float32) for s in batch.samples]
        penalties = compute_kl_token_rewards(batch, old, ref, algorithm, algorithm.kl.coefficient)
    found = {}
    for sample in add_advantages(batch, selection, algorithm, token_rewards=penalties).samples:
        values = sample.advantages[sample.loss_mask]
        assert np.ptp(values) <= 1e-6
        found[sample.sample_id] = float(values[0])
    return found


def half_malformed() -> Group:
    found, missing = RewardResult(value=1.0, correct=True), RewardResult(value=1.0, correct=True, verdict="no answer")
    return group(0, found, missing, found, missing)


def test_trained_rewards_a_penalty_in_a_group_of_equal_rewards_is_trained() -> None:
    # 1, 0.5, 1, 0.5: mean 0.75, unbiased deviation 0.288675
    found = advantages([half_malformed()], algorithm_of("grpo", **MALFORMED))
    assert found == pytest.approx({"0.0": 0.866, "0.1": -0.866, "0.2": 0.866, "0.3": -0.866}, abs=1e-3)


def test_trained_rewards_dapo_filters_by_accuracy_whatever_the_penalties() -> None:
    chosen = select_training_rollouts([half_malformed()], algorithm_of("dapo", **MALFORMED), max_new_tokens=MAX_LENGTH)
    assert chosen.draw_outcomes[0] == (DrawOutcome.FILTERED, "zero variance: every reward is 1")
    mixed = group(1, RewardResult(value=0.3, correct=True), RewardResult(value=0.3, correct=False))
    assert (
        select_training_rollouts([mixed], algorithm_of("dapo"), max_new_tokens=MAX_LENGTH).draw_outcomes[1][0]
        is DrawOutcome.TRAINED
    )
    unjudged = group(2, *valued(0.3, 0.3))
    assert (
        select_training_rollouts([unjudged], algorithm_of("dapo"), max_new_tokens=MAX_LENGTH).draw_outcomes[2][0]
        is DrawOutcome.FILTERED
    )


def test_trained_rewards_groups_are_judged_by_their_shaped_rewards_and_their_deviation() -> None:
    groups = [half_malformed(), group(1, *valued(0.9, 0.6))]

    def trained(**filters: Any) -> set[int]:
        algorithm = algorithm_of("grpo", **MALFORMED, filters=filters)
        found = select_training_rollouts(groups, algorithm, max_new_tokens=MAX_LENGTH).draw_outcomes
        return {draw_id for draw_id, (outcome, _) in found.items() if outcome is DrawOutcome.TRAINED}

    assert trained(max_mean=0.8) == {0, 1}  # 0.75 and 0.75
    assert trained(max_mean=0.8, metric="accuracy") == {1}  # 1 and, without a verdict, 0.75
    assert trained(min_std=0.2) == {0}  # 0.25 and 0.15
    assert trained(top_variance=0.5) == {0}


def test_trained_rewards_raft_keeps_what_it_weighs_positively() -> None:
    answers = [RewardResult(value=v, verdict=w) for v, w in ((0.4, "no answer"), (0.4, ""), (0.0, ""), (-0.2, ""))]
    assert advantages([group(0, *answers)], algorithm_of("raft_pp", **MALFORMED)) == pytest.approx({"0.1": 0.4})
    shifted = algorithm_of("raft_pp", reward={"shift": 0.1})
    assert advantages([group(0, *answers)], shifted) == pytest.approx({"0.0": 0.5, "0.1": 0.5, "0.2": 0.1})


def test_trained_rewards_best_and_worst_are_chosen_by_the_trained_reward() -> None:
    answers = [RewardResult(value=1.0, verdict="no answer"), *valued(0.8, 0.6)]
    best = algorithm_of("grpo", **MALFORMED, filters={"keep": "best", "keep_num": 1})
    assert set(advantages([group(0, *answers)], best)) == {"0.1"}


def test_trained_rewards_that_were_given_as_equal_stay_equal_whatever_turns_they_came_with() -> None:
    cut = group(0, *valued(0.3, 0.3))
    turns = [(Turn(start=0, end=1, reward=0.1), Turn(start=1, end=2, reward=0.2)), (Turn(start=0, end=2, reward=0.7),)]
    played = replace(cut, rollouts=tuple(replace(r, turns=t) for r, t in zip(cut.rollouts, turns, strict=True)))
    assert (
        select_training_rollouts([played], algorithm_of("grpo"), max_new_tokens=MAX_LENGTH).draw_outcomes[0][0]
        is DrawOutcome.FILTERED
    )


@given(
    reward=st.floats(-2.0, 3.0),
    length=st.integers(1, MAX_LENGTH),
    scale=st.floats(0.1, 5.0),
    shift=st.floats(-2.0, 2.0),
    clip=st.none() | st.floats(0.1, 3.0),
    buffer=st.integers(0, MAX_LENGTH),
    malformed=st.booleans(),
    metric=st.sampled_from(["reward", "accuracy"]),
    correct=st.none() | st.booleans(),
)
def test_trained_rewards_what_a_group_is_judged_by_lies_in_its_range(
    reward: float, length: int, buffer: int, malformed: bool, metric: str, correct: bool | None, **shaping: Any
) -> None:
    keys = {**shaping, "overlong_buffer": buffer, "overlong_penalty": 0.7, "format_penalty": 0.3}
    algorithm = algorithm_of("grpo", reward=keys, filters={"metric": metric})
    result = RewardResult(value=reward, correct=correct, verdict="no answer" if malformed else "")
    found = shape_rollout(group(0, result, length=length).rollouts[0], algorithm, MAX_LENGTH).filter_value
    between = compute_filter_value_range((-2.0, 3.0), algorithm, single_turn=True)
    assert between is not None
    assert between[0] - 1e-12 <= found <= between[1] + 1e-12


def test_trained_rewards_a_clip_that_spares_the_rewards_of_turns_bounds_nothing() -> None:
    clipped = algorithm_of("grpo", reward={"clip": 0.5}, filters={"max_mean": 0.9})
    assert compute_filter_value_range((0.0, 2.0), clipped, single_turn=True) == (0.0, 0.5)
    assert compute_filter_value_range((0.0, 2.0), clipped, single_turn=False) is None
    assert build_early_stop_predicate(clipped, (0.0, 2.0), MAX_LENGTH, single_turn=False) is None


@contextmanager
def nothing(name: str) -> Iterator[None]:
    yield


def selected(sources: list[dict[str, Any]], groups: list[Group], **algorithm: Any) -> Selection:
    """As the pipeline has it, of a configuration with these sources."""
    config = RLVRConfig.model_validate(
        {
            "name": "limits",
            "model": "m",
            "data": sources,
            "algorithm": algorithm,
            "rollout": {"max_new_tokens": MAX_LENGTH, "group_size": 2},
            "training": {"num_steps": 1},
        }
    )
    run: Any = SimpleNamespace(state=SimpleNamespace(moments={}), spans=SimpleNamespace(phase=nothing))
    batch: Any = SimpleNamespace(groups=groups, companions={}, rejection_reasons={}, expired={})

    async def shown(batch: Any) -> tuple[()]:
        return ()

    online: Any = SimpleNamespace(config=config, run=run)
    return asyncio.run(ReinforcementObjective(online=online, get_demonstrations=shown).collect(batch)).choice


def test_trained_rewards_a_source_with_turns_moves_no_limit_of_the_source_beside_it() -> None:
    single, game = {"source": "arithmetic", "reward": "math"}, {"source": "guess_number", "num_turns": 2}
    cut = group(0, *valued(1.0, 0.9), length=MAX_LENGTH, domain="arithmetic")
    played = group(1, *valued(1.0, 0.9), length=MAX_LENGTH, turns=2, domain="guess_number")
    shaping = {"overlong_buffer": 4, "overlong_penalty": 1.0}
    for sources in ([single], [single, game]):
        found = selected(sources, [cut, played], reward=shaping)
        # at its limit of 8 tokens the cut answer is punished in full; the game may have 16
        assert [s.episode.reward for s in found.trained_rollouts] == pytest.approx([0.0, -0.1, 1.0, 0.9])


def test_trained_rewards_the_constant_length_of_dr_grpo_is_a_prompts_own() -> None:
    groups = [group(0, *valued(1.0, 0.0)), group(1, *valued(1.0, 0.0), turns=2)]
    batch = build_batch([r for g in groups for r in g.rollouts], temperature=1.0, max_new_tokens=MAX_LENGTH)
    assert [s.max_length for s in batch.samples] == [8, 8, 16, 16]
    zeros = torch.zeros(4)
    inputs = LossInputs(
        logprobs=zeros,
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        advantages=zeros,
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        sequence_lengths=torch.tensor([2.0, 2.0]),
        num_tokens=4.0,
        num_sequences=2.0,
        num_units=2.0,
        max_lengths=torch.tensor([8.0, 16.0]),
    )
    assert compute_aggregation_weights(inputs, "constant_length").tolist() == [1 / 16, 1 / 16, 1 / 32, 1 / 32]


PENALTY = {"kl": {"coefficient": 0.5, "apply_to": "reward", "estimator": "k1"}}
DISTANCES = {"0.0": 0.2, "0.1": 0.0, "0.2": 0.1}
"""At each of two tokens: 0.5 x 2 x 0.2 = 0.2 from the first reward, nothing from the second, 0.1 from the third."""


def test_trained_rewards_rloo_leaves_one_out_of_the_penalised_rewards() -> None:
    # 1 - 0.2 = 0.8, 0.4, 0 - 0.1 = -0.1: 0.8 - 0.15, 0.4 - 0.35, -0.1 - 0.6
    found = advantages([group(0, *valued(1.0, 0.4, 0.0))], algorithm_of("rloo", **PENALTY), DISTANCES)
    assert found == pytest.approx({"0.0": 0.65, "0.1": 0.05, "0.2": -0.7}, abs=1e-6)


def test_trained_rewards_grpo_takes_mean_and_deviation_of_the_penalised_rewards() -> None:
    # 0.8, 0.4, -0.1: mean 0.366667, unbiased deviation 0.450925
    found = advantages([group(0, *valued(1.0, 0.4, 0.0))], algorithm_of("grpo", **PENALTY), DISTANCES)
    assert found == pytest.approx({"0.0": 0.96098, "0.1": 0.07392, "0.2": -1.03490}, abs=1e-4)


def test_trained_rewards_a_rollout_that_is_not_trained_counts_in_the_baseline_with_the_others_mean_penalty() -> None:
    best = algorithm_of("rloo", **PENALTY, filters={"keep": "extremes", "keep_num": 1})
    # the second is left out; its tokens count with (0.2 + 0.1) / 2 / 2 each: 0.4 - 0.15 = 0.25, beside 0.8 and -0.1
    found = advantages([group(0, *valued(1.0, 0.4, 0.0))], best, DISTANCES)
    assert found == pytest.approx({"0.0": 0.8 - (0.25 - 0.1) / 2, "0.2": -0.1 - (0.25 + 0.8) / 2}, abs=1e-6)


def test_trained_rewards_moments_of_the_run_cannot_be_taken_of_penalised_rewards() -> None:
    with pytest.raises(ValueError, match="which do not include the penalty: set kl"):
        algorithm_of("grpo", **PENALTY, advantage={"mean": "running"})
    algorithm_of("ppo", **PENALTY, advantage={"mean": "running"})  # whose penalty stays with its token


def test_trained_rewards_reinforce_pp_baseline_whitens_over_groups_that_are_not_trained_as_well() -> None:
    groups = [group(0, *valued(1.0, 0.0)), group(1, *valued(1.0, 1.0))]
    # centred: ±0.5 at 4 tokens, 0 at 4 more: deviation sqrt(1/8) = 0.353553
    found = advantages(groups, algorithm_of("reinforce_pp_baseline"))
    assert found == pytest.approx({"0.0": 1.41421, "0.1": -1.41421}, abs=1e-4)


def shares(sizes: list[int], num: int, step: int) -> list[list[str]]:
    groups = [group(i, *valued(*[0.0] * size)) for i, size in enumerate(sizes)]
    batch = build_batch([r for g in groups for r in g.rollouts], temperature=1.0, max_new_tokens=MAX_LENGTH)
    return [[s.sample_id for s in select_critic_batch(batch, m, num, first_critic=step).samples] for m in range(num)]


def test_trained_rewards_two_critics_get_the_odd_rollouts_in_turn() -> None:
    assert shares([3, 3], 2, 0) == [["0.0", "0.2", "1.1"], ["0.1", "1.0", "1.2"]]
    assert shares([3], 2, 0) == [["0.0", "0.2"], ["0.1"]]
    assert shares([3], 2, 1) == [["0.1"], ["0.0", "0.2"]]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 9))
def test_trained_rewards_shares_are_disjoint_complete_and_even_in_every_group_and_over_all(
    sizes: list[int], num: int, step: int
) -> None:
    found = shares(sizes, num, step)
    everything = sorted(f"{i}.{k}" for i, size in enumerate(sizes) for k in range(size))
    assert sorted(name for own in found for name in own) == everything
    for prefix in ["", *(f"{i}." for i in range(len(sizes)))]:
        counts = [sum(name.startswith(prefix) for name in own) for own in found]
        assert max(counts) - min(counts) <= 1


def test_trained_rewards_a_group_is_doomed_by_the_rewards_that_are_trained() -> None:
    one, cut = group(0, *valued(0.5)).rollouts, group(0, RewardResult(value=0.5, verdict="no answer")).rollouts

    def doomed(finished: Any, missing: int, **filters: Any) -> bool:
        doom = build_early_stop_predicate(
            algorithm_of("grpo", **MALFORMED, filters=filters), (0.0, 1.0), MAX_LENGTH, single_turn=True
        )
        return doom is not None and doom(finished, missing)

    # the other answer earns 1 at most: means 0.75, and 0.5 after the penalty
    assert not doomed(one, 1, min_mean=0.6)
    assert doomed(cut, 1, min_mean=0.6)
    # and -0.5 at least, where 0 would do for the reward as it is given
    assert doomed(one, 1, max_mean=-0.1)
    assert not doomed(one, 1, max_mean=0.1)
    assert not doomed(cut, 1, min_mean=0.6, metric="accuracy")
    assert not doomed(one, 1)
