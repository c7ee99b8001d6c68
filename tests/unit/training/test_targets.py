"""Samples with targets of their own: tokens to predict that are not the next tokens of the sequence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import make_spec

from roll.algorithms.losses import PolicyLoss
from roll.errors import DataError, ModelError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import TrainingBatch, TrainingSample


def sample(index: int, length: int = 9, *, unit: int = 0, targets: bool = True) -> TrainingSample:
    rng = np.random.default_rng(index)
    shared = np.random.default_rng(100).integers(4, 260, 40)
    tokens = np.concatenate([shared, rng.integers(4, 260, length)]).astype(np.int32)
    return TrainingSample(
        sample_id=str(index),
        unit=unit,
        prefix_length=40,
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) > 0,
        target_ids=rng.integers(4, 260, len(tokens)).astype(np.int32) if targets else None,
        rollout_logprobs=np.full(len(tokens), -5.0, np.float32),
        advantages=rng.normal(size=len(tokens)).astype(np.float32),
        max_length=16,
    )


def expected_logprobs(model: Path, each: TrainingSample) -> np.ndarray:
    """The log-probs of a sample's targets by `transformers` alone."""
    network = load_causal_lm(str(model), "float32", attention="eager")
    with torch.no_grad():
        logits = network(torch.from_numpy(each.token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    wanted = each.token_ids if each.target_ids is None else each.target_ids
    return logits[:-1].gather(-1, torch.from_numpy(wanted[1:].astype(np.int64))[:, None])[:, 0].numpy()


def test_targets_of_samples_with_a_common_prefix_are_their_own(tiny_model: Path) -> None:
    samples = (sample(0), sample(1, 5), sample(2, 7, targets=False), sample(3, 4, targets=False))
    result = TorchBackend(make_spec(tiny_model)).measure(TrainingBatch(samples=samples), PolicyLoss())
    assert result.num_tokens == 40 + 8 + 4 + 6 + 3  # the prefix is computed once
    for each, got in zip(samples, result.logprobs, strict=True):
        np.testing.assert_allclose(got[1:], expected_logprobs(tiny_model, each), atol=2e-6)


def test_targets_outside_the_vocabulary_are_rejected(tiny_model: Path) -> None:
    one = sample(0)
    assert one.target_ids is not None
    wrong = dataclasses.replace(one, target_ids=np.where(one.target_ids == one.target_ids[3], 260, one.target_ids))
    with pytest.raises(ModelError, match="has token 260"):
        TorchBackend(make_spec(tiny_model)).measure(TrainingBatch(samples=(wrong,)), PolicyLoss())


def test_targets_of_another_length_are_rejected() -> None:
    with pytest.raises(DataError, match="target_ids has 3 entries"):
        dataclasses.replace(sample(0), target_ids=np.zeros(3, np.int32))
