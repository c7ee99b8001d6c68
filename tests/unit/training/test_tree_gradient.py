"""Samples that share prefixes in a tree give the gradient that they give one by one, whatever the loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_helpers import branching_batch, grads_of, make_spec, off_policy, relative_error
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from worlds.tiny_model import write_tiny_model

from roll.algorithms.correction import Correction
from roll.algorithms.losses import (
    AttentionCreditLoss,
    DistillationLoss,
    KTOLoss,
    LikelihoodLoss,
    PolicyAndValueLoss,
    PolicyLoss,
    TopKDistillationLoss,
    ValueLoss,
)
from roll.models import load_causal_lm
from roll.protocols import LossFn
from roll.training import TorchBackend
from roll.training.packing import blocks
from roll.training.packing.micro_batches import pack
from roll.training.precision import Precision
from roll.types import AttentionRange, Divergence, TopLogprobs, TrainingBatch, TrainingSample

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
CREDIT = AttentionRange(window=4, horizon=(2, 7))
LOSSES: dict[str, LossFn] = {
    "tokens": PolicyLoss(kl_coefficient=0.1),
    "chunks": PolicyLoss(ratio_level="chunk", correction=Correction(level="chunk")),
    "sequences": PolicyLoss(ratio_level="sequence", correction=Correction(level="sequence", upper=None)),
    "sequences by token": PolicyLoss(ratio_level="sequence_token", aggregation="constant_length"),
    "vetoed sequences": PolicyLoss(correction=Correction(veto=1e-3), aggregation="token_mean"),
    "entropy and exact KL": PolicyLoss(entropy_coefficient=0.1, kl_coefficient=0.1, kl_estimator="full"),
    "attention": AttentionCreditLoss(loss=PolicyLoss(), range=CREDIT),
    "values": PolicyAndValueLoss(policy=PolicyLoss(), value=ValueLoss(), coefficient=0.5),
    "likelihood": LikelihoodLoss(),
    "divergence": DistillationLoss(divergence=Divergence(kind="jsd")),
    "likeliest tokens": TopKDistillationLoss(),
    "scores of sequences": KTOLoss(reference_point=0.1),
}


@pytest.fixture(autouse=True)
def _exact_and_with_short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of transformers round to float32, whatever the model's dtype."""

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(blocks, "MIN_SHARED_TOKENS", 2)


@pytest.fixture(scope="module", name="other_model")
def _other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("other"), seed=9)


def everything(batch: TrainingBatch, model: Any) -> TrainingBatch:
    """The batch with every column that some loss needs."""
    rng = np.random.default_rng(1)
    batch = off_policy(batch, model)

    def complete(sample: TrainingSample) -> TrainingSample:
        size = len(sample)
        ids = np.argsort(rng.random((size, 260)), axis=1)[:, :3].astype(np.int32)
        return dataclasses.replace(
            sample,
            rollout_logprobs=np.where(sample.loss_mask, sample.old_logprobs - rng.normal(0, 0.1, size), 0.0).astype(
                np.float32
            ),
            returns=rng.normal(size=size).astype(np.float32),
            old_values=rng.normal(size=size).astype(np.float32),
            teacher_top=TopLogprobs(token_ids=ids, logprobs=np.log(np.full((size, 3), 0.3, np.float32))),
            preferred=len(sample.sequence) == 0,
        )

    return dataclasses.replace(batch, samples=tuple(map(complete, batch.samples)))


def trainer(model: Path, name: str, other: Path, **training: Any) -> TorchBackend:
    """What a loss of this name is trained with; the policy has left its reference, and its value head is not 0."""
    extra: dict[str, Any] = {
        "values": {"value_head_learning_rate": 1e-3},
        "entropy and exact KL": {"holds_reference": True},
        "divergence": {"teachers": (str(other),)},
    }.get(name, {})
    backend = TorchBackend(dataclasses.replace(make_spec(model, **training), **extra), precision=DOUBLE)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name in backend.masters.parameters:
            weight = backend.masters.get_full(name)
            weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    backend.masters.refresh()
    return backend


def compare(model: Path, other: Path, name: str, batch: TrainingBatch, **training: Any) -> None:
    """Shared prefixes beside one sample after the other."""
    loss = LOSSES[name]
    alone = trainer(model, name, other, share_prefix=False)
    shared = trainer(model, name, other, **training)
    expected, found = (backend.train_step(batch, loss) for backend in (alone, shared))
    assert found.num_tokens < expected.num_tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-9)
    assert relative_error(grads_of(shared), grads_of(alone)) <= 1e-9
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(found.logprobs, expected.logprobs, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_tree_gradient_every_loss_has_the_gradient_of_separate_samples(
    tiny_model: Path, other_model: Path, name: str
) -> None:
    batch = everything(branching_batch(1), load_causal_lm(tiny_model, torch.float64, attention="sdpa"))
    compare(tiny_model, other_model, name, batch, max_tokens_per_micro_batch=120)


@pytest.mark.parametrize("name", ["tokens", "sequences"])
@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 25}, {"activation_checkpointing": True}])
def test_tree_gradient_micro_batches_and_checkpointing_change_nothing(
    tiny_model: Path, other_model: Path, name: str, settings: dict[str, Any]
) -> None:
    batch = everything(branching_batch(2, units=3), load_causal_lm(tiny_model, torch.float64, attention="sdpa"))
    compare(tiny_model, other_model, name, batch, **settings)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**16), st.integers(4, 14), st.sampled_from([(1, 4), (4, 12), (30, 60)]))
def test_tree_gradient_any_tree_has_the_gradient_of_separate_samples(
    tiny_model: Path, other_model: Path, seed: int, size: int, grown: tuple[int, int]
) -> None:
    model = load_causal_lm(tiny_model, torch.float64, attention="sdpa")
    batch = everything(branching_batch(seed, units=1, size=size, grown=grown), model)
    compare(tiny_model, other_model, "tokens", batch)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_tree_gradient_a_loss_that_pools_over_a_sequence_gets_it_whole(ranks: int, budget: int, share: bool) -> None:
    batch = branching_batch(5, units=2)
    packed = pack(batch.samples, max_tokens=budget, share_prefix=share, num_ranks=ranks, whole_sequences=True)
    homes: dict[str, set[tuple[int, int]]] = {}
    indices = []
    for rank, micro_batches in enumerate(packed):
        for number, micro in enumerate(micro_batches):
            for member in (m for block in micro for m in block.members):
                indices.append(member.index)
                homes.setdefault(member.sample.sequence or member.sample.sample_id, set()).add((rank, number))
    assert sorted(indices) == list(range(len(batch.samples)))
    assert all(len(places) == 1 for places in homes.values())
    assert all(any(micro_batches) for micro_batches in packed)


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_tree_gradient_a_rollout_of_several_samples_counts_once(tiny_model: Path, level: Any) -> None:
    """Both ways of a mean over rollouts: its samples in one micro-batch, or in several."""
    batch = branching_batch(3)
    loss = PolicyLoss(ratio_level=level, correction=Correction(upper=None))
    backend = TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=20), precision=DOUBLE)
    result = backend.train_step(batch, loss)
    means = [
        np.concatenate([s.advantages[s.loss_mask] for s in (batch.samples[i] for i in places)]).mean()
        for places in batch.sequences
    ]  # ratios are 1
    assert len(means) < len(batch.samples)
    assert result.loss == pytest.approx(-np.mean(means), rel=1e-5)
