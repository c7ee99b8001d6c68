"""The differences between the log-probs of engine and trainer that every step reports, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roll.pipelines.learning.measures import compute_agreement_metrics
from roll.types import StepResult, TrainingBatch, TrainingSample

ENGINE, TRAINER = [0.0, -1.0, -2.0, -3.0], [0.0, -1.5, -1.0, -3.0]
"""The first entry belongs to the prompt, the last one to a token without loss."""
DIFFERENCES = (-0.5, 1.0)
"""Log of the ratio of the trainer's to the engine's probability, for both loss tokens."""


def make_sample(old_logprobs: list[float] | None, **changes: bool) -> TrainingSample:
    return TrainingSample(
        sample_id="",
        unit=0,
        prefix_length=1,
        token_ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, True, True, False]),
        rollout_logprobs=np.array(ENGINE, np.float32),
        old_logprobs=None if old_logprobs is None else np.array(old_logprobs, np.float32),
        **changes,
    )


@pytest.mark.parametrize("from_update", [False, True], ids=["before the update", "in its forward pass"])
def test_agreement_metrics_by_hand(from_update: bool) -> None:
    batch = TrainingBatch(samples=(make_sample(None if from_update else TRAINER),))
    result = StepResult(loss=0.0, num_tokens=4, num_loss_tokens=2, logprobs=(np.array(TRAINER, np.float32),))
    found = compute_agreement_metrics(batch, [result] if from_update else [])
    factors = [math.exp(difference) for difference in DIFFERENCES]
    assert found["agreement/logprob_mean_abs"] == pytest.approx(0.75)
    assert found["agreement/logprob_max_abs"] == pytest.approx(1.0)
    # Not symmetric: 0.26 nats if engine and trainer were exchanged.
    k3 = sum(factor - 1 - difference for factor, difference in zip(factors, DIFFERENCES, strict=True)) / 2
    assert found["agreement/divergence"] == pytest.approx(k3) == pytest.approx(0.41241, abs=1e-5)
    assert found["agreement/factor_p50"] == pytest.approx(sum(factors) / 2)
    assert found["agreement/effective_sample_share"] == pytest.approx(
        sum(factors) ** 2 / (2 * sum(factor**2 for factor in factors))
    )


def test_agreement_of_demonstrations_and_of_steps_without_log_probs_is_not_reported() -> None:
    assert compute_agreement_metrics(TrainingBatch(samples=(make_sample(TRAINER, expert=True),)), []) == {}
    assert compute_agreement_metrics(TrainingBatch(samples=(make_sample(None),)), []) == {}
