"""What the trainer said of every token, beside the rollouts' tokens."""

from __future__ import annotations

import numpy as np
import pytest

from roll.algorithms.minibatches import split_into_minibatches
from roll.config.algorithm_parts import UpdateConfig
from roll.pipelines.learning.token_columns import build_token_columns
from roll.types import StepResult, TrainingBatch, TrainingSample

SEED = (0, 5)


def sample(
    name: str, unit: int, *, prefix: int = 1, length: int = 2, sequence: str = "", **columns: object
) -> TrainingSample:
    """`prefix` tokens of context, then `length` of its own, of which the loss counts all but the last."""
    mask = np.array([False] * prefix + [True] * (length - 1) + [False])
    advantages = np.full(prefix + length, float(unit), np.float32)
    return TrainingSample(
        sample_id=name, unit=unit, sequence=sequence, prefix_length=prefix,
        token_ids=np.zeros(prefix + length, np.int32), loss_mask=mask, advantages=advantages, **columns,  # type: ignore[arg-type]
    )  # fmt: skip


def result(batch: TrainingBatch, first: float) -> StepResult:
    """Log-probs `first`, `first` + 1, … of the batch's samples."""
    logprobs = tuple(np.full(len(s), first + i, np.float32) for i, s in enumerate(batch.samples))
    return StepResult(loss=0.0, num_tokens=0, num_loss_tokens=0, logprobs=logprobs)


def lists(columns: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in columns.items()}


def test_token_columns_of_one_update_the_trainers_logprobs_are_those_it_began_with() -> None:
    batch = TrainingBatch(samples=(sample("0.0", 1), sample("0.1", 1, prefix=2)))
    found = build_token_columns(batch, [result(batch, -5.0)], UpdateConfig(), SEED)
    assert lists(found["0.0"]) == {
        "trainer_logprobs": [-5.0, pytest.approx(np.nan, nan_ok=True)],
        "token_advantages": [1.0, pytest.approx(np.nan, nan_ok=True)],
    }
    assert found["0.1"]["trainer_logprobs"][0] == -4.0


def test_token_columns_of_several_updates_the_last_is_kept_beside_the_old_ones() -> None:
    updates = UpdateConfig(num_minibatches=2, num_epochs=2)
    old, ref = np.full(3, -1.0, np.float32), np.full(3, -2.0, np.float32)
    batch = TrainingBatch(samples=tuple(sample(f"{u}.0", u, old_logprobs=old, ref_logprobs=ref) for u in range(2)))
    parts = [part for epoch in range(2) for part in split_into_minibatches(batch, 2, (*SEED, 0, epoch))]
    results = [result(part, -10.0 * (i + 1)) for i, part in enumerate(parts)]
    found = build_token_columns(batch, results, updates, SEED)
    second = {part.samples[0].sample_id: -10.0 * (3 + i) for i, part in enumerate(parts[2:])}
    for name in ("0.0", "1.0"):
        assert found[name]["trainer_logprobs"][0] == -1.0
        assert found[name]["ref_logprobs"][0] == -2.0
        assert found[name]["update_logprobs"][0] == second[name]


def test_token_columns_samples_of_a_rewritten_history_are_one_rollout_without_its_contexts() -> None:
    samples = (
        sample("3.0", 3, prefix=2, length=3, sequence="train-3.0"),
        sample("3.0.1", 3, prefix=4, sequence="train-3.0"),
    )
    batch = TrainingBatch(samples=samples)
    found = build_token_columns(batch, [result(batch, 0.0)], UpdateConfig(), SEED)
    assert list(found) == ["3.0"]
    assert np.nan_to_num(found["3.0"]["trainer_logprobs"], nan=9.0).tolist() == [0.0, 0.0, 9.0, 1.0, 9.0]


def test_token_columns_what_is_imitated_and_what_a_back_end_does_not_say_is_left_out() -> None:
    batch = TrainingBatch(samples=(sample("0.0", 1), sample("0.1", 1, expert=True)))
    silent = StepResult(loss=0.0, num_tokens=0, num_loss_tokens=0)
    found = build_token_columns(batch, [silent], UpdateConfig(), SEED)
    assert list(found) == ["0.0"] and list(found["0.0"]) == ["token_advantages"]
