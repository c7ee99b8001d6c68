"""Which tokens are scored by which snapshot, and what mismatch and staleness come to, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines.snapshots import PolicySnapshots, compute_train_inference_metrics
from roll.types import ForwardOptions, StepResult, TrainingBatch, TrainingSample

NAN = float("nan")


def sample(
    index: int, versions: list[int], rollout: list[float], *, expert: bool = False, **given: Any
) -> TrainingSample:
    """One with a prompt of one token."""
    columns = {name: np.array([0.0, *column], np.float32) for name, column in given.items()}
    return TrainingSample(
        sample_id=str(index),
        unit=index,
        prefix_length=1,
        token_ids=np.arange(len(versions) + 1, dtype=np.int32),
        loss_mask=np.arange(len(versions) + 1) >= 1,
        rollout_logprobs=np.array([0.0, *rollout], np.float32),
        policy_versions=np.array([-1, *versions], np.int32),
        expert=expert,
        **columns,
    )


class Policy:
    """A trainer that says -1 - version of every token, and remembers what it was asked."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, tuple[int, ...]]] = []
        self.asked: list[tuple[int, list[str]]] = []

    async def keep_snapshot(self, version: int, versions: Sequence[int]) -> None:
        self.kept.append((version, tuple(versions)))

    async def forward(self, batch: TrainingBatch, outputs: Sequence[str], options: ForwardOptions) -> dict[str, Any]:
        assert options.version is not None
        self.asked.append((options.version, [s.sample_id for s in batch.samples]))
        return {"logprobs": [np.full(len(s), -1.0 - options.version, np.float32) for s in batch.samples]}


def of(num: int) -> tuple[PolicySnapshots, Policy]:
    policy: Any = Policy()
    return PolicySnapshots(policy, num), policy


async def test_policy_snapshots_of_the_last_versions_are_kept() -> None:
    snapshots, policy = of(2)
    for version in (0, 1, 1, 2, 3):  # a step that was skipped leaves the version as it was
        await snapshots.store_weights(version)
    assert policy.kept == [(0, (0,)), (1, (0, 1)), (1, (0, 1)), (2, (1, 2)), (3, (2, 3))]
    none, policy = of(0)
    await none.store_weights(0)
    assert policy.kept == []  # a synchronous run needs none


async def test_policy_snapshots_score_each_stale_token_under_the_version_that_sampled_it() -> None:
    snapshots, policy = of(2)
    for version in (3, 4):
        await snapshots.store_weights(version)
    batch = TrainingBatch(
        samples=(
            sample(0, [3, 4, 5], [-1.0] * 3),
            sample(1, [5, 5], [-1.0] * 2),
            sample(2, [4, 4], [-1.0] * 2),
            sample(3, [0, 0], [0.0] * 2, expert=True),
            sample(4, [2, 4], [-1.0] * 2),  # older than anything that is kept
        )
    )
    found = await snapshots.compute_logprobs(batch, 5)
    assert policy.asked == [(3, ["0"]), (4, ["0", "2", "4"])]
    assert found[1] is None and found[3] is None
    np.testing.assert_equal(found[0], np.array([NAN, -4.0, -5.0, NAN], np.float32))
    np.testing.assert_equal(found[2], np.array([NAN, -5.0, -5.0], np.float32))
    np.testing.assert_equal(found[4], np.array([NAN, NAN, -5.0], np.float32))


def test_policy_snapshots_mismatch_and_staleness_by_hand() -> None:
    """Version 5 learns. Engine, the trainer at the token's version, and the trainer now:

    token 1 (v 4):  -1.0   -1.1   -1.4     mismatch -0.1   staleness -0.3
    token 2 (v 5):  -2.0   -1.8   -1.8     mismatch  0.2   staleness  0
    token 3 (v 3):  -1.0   unknown
    """
    own = sample(0, [4, 5, 3], [-1.0, -2.0, -1.0], old_logprobs=[-1.4, -1.8, -1.2], behavior_logprobs=[-1.1, NAN, NAN])
    shown = sample(1, [0], [0.0], expert=True, old_logprobs=[-9.0])
    found = compute_train_inference_metrics(TrainingBatch(samples=(own, shown)), [], version=5)
    k3 = {d: math.exp(d) - 1 - d for d in (-0.1, 0.2, -0.3)}
    expected = {
        "stale_share": 2 / 3,
        "known_share": 2 / 3,
        "mismatch/log_ratio_mean": 0.05,
        "mismatch/log_ratio_mean_abs": 0.15,
        "mismatch/log_ratio_max_abs": 0.2,
        "mismatch/kl": (k3[-0.1] + k3[0.2]) / 2,
        "staleness/log_ratio_mean": -0.15,
        "staleness/log_ratio_mean_abs": 0.15,
        "staleness/log_ratio_max_abs": 0.3,
        "staleness/kl": k3[-0.3] / 2,
    }
    assert found == pytest.approx({f"train_inference/{name}": value for name, value in expected.items()}, abs=1e-7)


def test_policy_snapshots_mismatch_of_a_token_that_the_trainer_finds_nearly_certain_is_finite() -> None:
    """An engine's log-prob may be arbitrarily low; the divergence counts it as one of e^20."""
    own = sample(0, [5], [-2000.0], old_logprobs=[-1.0])
    found = compute_train_inference_metrics(TrainingBatch(samples=(own,)), [], version=5)
    assert found["train_inference/mismatch/log_ratio_max_abs"] == pytest.approx(1999.0)
    assert found["train_inference/mismatch/kl"] == pytest.approx(math.exp(20) - 21)


def test_policy_snapshots_without_snapshots_mismatch_is_of_fresh_tokens_and_staleness_is_not_claimed() -> None:
    """The log-probs come from the only update's own forward pass."""
    batch = TrainingBatch(samples=(sample(0, [4, 5], [-1.0, -2.0]),))
    result = StepResult(loss=0.0, num_tokens=3, num_loss_tokens=2, logprobs=(np.array([0.0, -1.5, -1.75], np.float32),))
    found = compute_train_inference_metrics(batch, [result], version=5)
    assert found["train_inference/known_share"] == 0.5
    assert found["train_inference/mismatch/log_ratio_mean"] == pytest.approx(0.25)
    assert not any("staleness" in name for name in found)
    fresh = compute_train_inference_metrics(batch, [result], version=4)
    assert fresh["train_inference/staleness/log_ratio_max_abs"] == fresh["train_inference/stale_share"] == 0.0
    assert compute_train_inference_metrics(batch, [], version=5) == {}


@given(st.lists(st.tuples(st.integers(0, 5), *[st.floats(-8, 0, width=32)] * 3), min_size=1, max_size=9))
def test_policy_snapshots_mismatch_and_staleness_add_up_to_the_whole_difference(
    tokens: list[tuple[int, float, float, float]],
) -> None:
    versions, rollout, behavior, old = (list(column) for column in zip(*tokens, strict=True))
    behavior = [b if v < 5 else NAN for v, b in zip(versions, behavior, strict=True)]
    one = sample(0, versions, rollout, old_logprobs=old, behavior_logprobs=behavior)
    found = compute_train_inference_metrics(TrainingBatch(samples=(one,)), [], version=5)
    total = float(np.mean(np.array(old, np.float64) - np.array(rollout, np.float64)))
    parts = [found[f"train_inference/{name}/log_ratio_mean"] for name in ("mismatch", "staleness")]
    assert sum(parts) == pytest.approx(total, abs=1e-5)


def settings(scheduling: dict[str, Any], training: dict[str, Any], **algorithm: Any) -> RLVRConfig:
    return RLVRConfig.model_validate({
        "name": "x", "model": "m", "data": [{"source": "arithmetic", "reward": "math"}], "algorithm": algorithm,
        "rollout": {"scheduling": scheduling}, "training": {"num_steps": 1, **training},
    })  # fmt: skip


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": {"snapshots": True}},
        {"correction": {"corrects": "mismatch"}},
        {"correction": {"corrects": "staleness"}},
        {"ratio": {"against": "behavior"}, "correction": {"corrects": "mismatch"}},
    ],
    ids=str,
)
def test_policy_snapshots_are_as_many_as_the_async_ratio_allows(algorithm: dict[str, Any]) -> None:
    assert settings({"async_ratio": 1.5}, {}, **algorithm).num_snapshots == 2
    assert settings({}, {}, **algorithm).num_snapshots == 0
    assert settings({"async_ratio": 1.5}, {}).num_snapshots == 0
    with pytest.raises(ValueError, match=r"training\.backend deepspeed does not support snapshots"):
        settings({"async_ratio": 1.0}, {"backend": "deepspeed"}, **algorithm)
    assert settings({}, {"backend": "deepspeed"}, **algorithm).algorithm.uses_snapshots


@pytest.mark.parametrize("corrects", ["both", "staleness"])
def test_policy_snapshots_staleness_in_the_ratio_is_not_corrected_twice(corrects: str) -> None:
    with pytest.raises(ValueError, match=f"would correct for it twice with correction.corrects {corrects}"):
        settings({}, {}, ratio={"against": "behavior"}, correction={"corrects": corrects})
    alone = {"corrects": corrects, "upper": None}
    assert settings({}, {}, ratio={"against": "behavior"}, correction=alone).algorithm.uses_snapshots
