"""A rollout as training samples: one for every context, as the engine saw it; and what its tokens are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.minibatches import select_critic_batch
from roll.algorithms.rewards import shape_rollout
from roll.algorithms.selection import Selection
from roll.algorithms.token_weights import add_advantages, compute_kl_token_rewards
from roll.config.algorithm import AlgorithmConfig
from roll.data.samples import build_batch, build_samples
from roll.pipelines.learning.measures import compute_mean_advantages
from roll.types import EXPERT, Branch, Prompt, RewardResult, Rollout, TrainingBatch, Turn


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def rollout(branches: tuple[Branch, ...] = (), *, draw: int = 7, index: int = 1, reward: float = 1.0) -> Rollout:
    """Three turns of two tokens, with one of the environment behind the first and the second."""
    return Rollout(
        draw_id=draw,
        index=index,
        prompt=Prompt(uid="u", domain="d", messages=(), turns=3),
        prompt_token_ids=ints(1, 2, 3),
        token_ids=ints(10, 11, 90, 12, 13, 91, 14, 15),
        logprobs=-np.arange(1, 9, dtype=np.float32),
        policy_versions=ints(4, 4, -1, 4, 5, -1, 5, 5),
        finish_reason="stop",
        text="",
        reward=RewardResult(value=reward),
        turns=(Turn(start=0, end=2), Turn(start=3, end=5), Turn(start=6, end=8, reward=0.25)),
        branches=branches,
    )


SECOND = Branch(start=3, context=ints(1, 2, 3, 11, 90))
THIRD = Branch(start=6, context=ints(1, 9))


def test_training_sample_a_rollout_whose_history_stands_is_one_sample() -> None:
    (sample,) = build_samples(rollout(), max_new_tokens=5)
    assert (sample.sample_id, sample.sequence, sample.prefix_length, sample.max_length) == ("7.1", "", 3, 15)
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, 90, 12, 13, 91, 14, 15]
    assert np.flatnonzero(sample.loss_mask).tolist() == [3, 4, 6, 7, 9, 10]


def test_training_sample_each_context_is_a_sample_of_what_the_engine_saw_and_wrote() -> None:
    first, second, third = build_samples(rollout((SECOND, THIRD)))
    assert [s.sample_id for s in (first, second, third)] == ["7.1", "7.1.1", "7.1.2"]
    assert {(s.unit, s.sequence) for s in (first, second, third)} == {(7, "train-7.1")}
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11, 90]
    assert second.token_ids.tolist() == [1, 2, 3, 11, 90, 12, 13, 91]
    assert third.token_ids.tolist() == [1, 9, 14, 15]
    assert [s.prefix_length for s in (first, second, third)] == [3, 5, 2]
    assert second.loss_mask.tolist() == [False] * 5 + [True, True, False]
    assert second.rollout_logprobs.tolist() == [0.0] * 5 + [-4.0, -5.0, 0.0]
    assert second.policy_versions.tolist() == [-1] * 5 + [4, 5, -1]
    assert second.chunk_ids.tolist() == [-1] * 5 + [1, 1, -1]
    assert third.chunk_ids.tolist() == [-1, -1, 2, 2]


def test_training_sample_a_context_rewritten_before_the_first_turn_takes_the_place_of_the_prompt() -> None:
    samples = build_samples(rollout((Branch(start=0, context=ints(8)), THIRD)))
    assert [s.sample_id for s in samples] == ["7.1", "7.1.1"]
    assert samples[0].token_ids.tolist() == [8, 10, 11, 90, 12, 13, 91]


@given(st.lists(st.sampled_from([0, 3, 6]), unique=True), st.integers(0, 20))
def test_training_sample_have_every_token_of_the_rollout_once_behind_their_contexts(
    starts: list[int], size: int
) -> None:
    whole = rollout(tuple(Branch(start=s, context=np.arange(size, dtype=np.int32)) for s in sorted(starts)))
    samples = build_samples(whole)
    for name in ("token_ids", "policy_versions"):
        own = np.concatenate([getattr(s, name)[s.prefix_length :] for s in samples])
        assert own.tolist() == getattr(whole, name).tolist()
    assert sum(int(s.loss_mask.sum()) for s in samples) == 6
    assert len({s.sample_id for s in samples}) == len(samples)
    assert TrainingBatch(samples=samples).num_sequences == 1


def weighed(rollouts: list[Rollout], algorithm: AlgorithmConfig, **said: Any) -> TrainingBatch:
    """The batch of two rollouts of a draw, and of an expert's, weighed."""
    shaped = [shape_rollout(r, algorithm, 8) for r in rollouts]
    own = [s for s in shaped if not s.rollout.expert]
    selection = Selection(
        trained_rollouts=tuple(own),
        outcomes=np.array([1.0, -1.0]),
        demonstrations=tuple(s for s in shaped if s.rollout.expert),
        draw_outcomes={},
        accuracies={7: 0.5},
    )
    batch = build_batch(selection.rollouts, temperature=1.0, max_new_tokens=8)
    given = {name: make(batch) for name, make in said.items()}
    return add_advantages(batch, selection, algorithm, **given)


def by_token(batch: TrainingBatch, name: str) -> list[list[float]]:
    """A column of each rollout's own tokens."""
    own = [getattr(s, name)[s.prefix_length :].tolist() for s in batch.samples]
    return [[x for i in places for x in own[i]] for places in batch.sequences]


def numbered(batch: TrainingBatch) -> list[np.ndarray]:
    """[L] for every sample, such that a rollout's own tokens have 0, 1, 2, … and contexts something else."""
    found = []
    for places in batch.sequences:
        at = 0
        for sample in (batch.samples[i] for i in places):
            own = len(sample) - sample.prefix_length
            found.append(
                np.concatenate([np.full(sample.prefix_length, 99), at + np.arange(own)]).astype(np.float32) / 8
            )
            at += own
    return found


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo"},
    "gae": {"type": "ppo", "advantage": {"gamma": 0.9, "gae_lambda": 0.8}},
    "kl": {"type": "reinforce_pp", "kl": {"coefficient": 0.1, "apply_to": "reward"}},
    "chunks": {"type": "ipa"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_sample_a_rewritten_history_changes_where_tokens_stand_and_not_what_they_are_worth(name: str) -> None:
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    said: dict[str, Any] = {}
    if name == "gae":
        said["values"] = lambda batch: [numbered(batch), [2 * x for x in numbered(batch)]]
    if name == "kl":
        said["token_rewards"] = lambda batch: [
            np.where(s.loss_mask, x, 0).astype(np.float32) for s, x in zip(batch.samples, numbered(batch), strict=True)
        ]
    branches = [(SECOND, THIRD), (THIRD,), (SECOND,)]
    rollouts = [rollout(index=0), rollout(index=1, reward=0.0), replace(rollout(), purpose=EXPERT, expert=True)]
    rewritten = [replace(r, branches=b) for r, b in zip(rollouts, branches, strict=True)]
    plain, several = weighed(rollouts, algorithm, **said), weighed(rewritten, algorithm, **said)
    assert len(plain.samples) == 3 and len(several.samples) == 7
    assert by_token(plain, "advantages") == by_token(several, "advantages")
    assert any(any(x) for x in by_token(plain, "advantages"))
    assert not any(s.advantages[: s.prefix_length].any() for s in several.samples)
    assert compute_mean_advantages(several).keys() == compute_mean_advantages(plain).keys()
    if name == "gae":
        own = replace(several, samples=tuple(s for s in several.samples if not s.expert))
        expected = replace(plain, samples=plain.samples[:2])
        assert by_token(own, "returns") == by_token(expected, "returns")
        assert by_token(own, "old_values") == by_token(expected, "old_values")


def test_training_sample_a_penalty_per_token_is_of_the_tokens_that_were_written() -> None:
    batch = build_batch([rollout((SECOND,))], temperature=1.0, max_new_tokens=8)
    algorithm = AlgorithmConfig.model_validate({"type": "grpo", "kl": {"estimator": "k1"}})
    own, ref = ([np.full(len(s), x, np.float32) for s in batch.samples] for x in (-1.0, -3.0))
    rewards = compute_kl_token_rewards(batch, own, ref, algorithm, 0.5)
    assert [r.tolist() for r in rewards] == [np.where(s.loss_mask, -1.0, 0.0).tolist() for s in batch.samples]


def test_training_sample_critics_are_dealt_whole_rollouts() -> None:
    rollouts = [rollout((SECOND,) if i % 2 else (SECOND, THIRD), index=i) for i in range(6)]
    batch = build_batch(rollouts, temperature=1.0, max_new_tokens=8)
    shares = [select_critic_batch(batch, critic, 2) for critic in range(2)]
    assert [{s.sequence for s in share.samples} for share in shares] == [
        {f"train-7.{i}" for i in range(first, 6, 2)} for first in range(2)
    ]
    assert [share.num_sequences for share in shares] == [3, 3]
