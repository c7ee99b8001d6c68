"""The same rollouts give the same loss and gradient, however they go through the network."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import (
    grads_of,
    make_batch,
    make_spec,
    off_policy,
    reference_logprobs,
    reference_loss,
    relative_error,
)
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.precision import Precision
from roll.types import TrainingBatch

LOSS = PolicyLoss(kl_coefficient=0.1)
LAYOUTS: list[dict[str, Any]] = [
    {"share_prefix": True},
    {"share_prefix": False},
    {"share_prefix": True, "max_tokens_per_micro_batch": 45},
    {"share_prefix": True, "max_tokens_per_micro_batch": 24},  # groups are split
    {"share_prefix": False, "max_tokens_per_micro_batch": 1},  # every sample alone
    {"share_prefix": True, "activation_checkpointing": True},
]


@dataclass(frozen=True)
class Reference:
    """What a padded forward and backward pass by transformers alone gives."""

    batch: TrainingBatch
    loss: float
    grads: dict[str, torch.Tensor]


@functools.cache
def reference(model_path: Path, batch_seed: int, dtype: torch.dtype, **shape: Any) -> Reference:
    """Rollouts near the model's policy, and their loss and gradients."""
    model = load_causal_lm(model_path, dtype, attention="sdpa" if dtype is torch.float64 else "eager")
    batch = off_policy(make_batch(batch_seed, **shape), model)
    loss = reference_loss(reference_logprobs(model, batch), batch, clip=0.2, kl=0.1)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Reference(batch=batch, loss=loss.item(), grads=grads)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda s: "-".join(f"{k[:5]}={v}" for k, v in s.items()))
def test_gradient_parity_packing_sharing_and_micro_batches_do_not_change_loss_or_gradient(
    tiny_model: Path, settings: dict[str, Any], dtype: torch.dtype, limit: float
) -> None:
    expected = reference(tiny_model, 0, dtype)
    backend = TorchBackend(make_spec(tiny_model, **settings), precision=Precision(compute=dtype, master=dtype))
    result = backend.train_step(expected.batch, LOSS)
    assert 0 < result.metrics["policy/clip_fraction"] < 1
    assert abs(result.loss - expected.loss) <= limit * result.metrics["policy/loss_scale"]
    assert relative_error(grads_of(backend), expected.grads) <= limit
    norm = torch.stack([g.double().norm() for g in expected.grads.values()]).norm()
    assert result.grad_norm == pytest.approx(float(norm), rel=10 * limit)


def test_gradient_parity_untied_embeddings_get_the_reference_gradient(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "untied", tied=False, seed=3)
    expected = reference(model, 1, torch.float32)
    backend = TorchBackend(make_spec(model, max_tokens_per_micro_batch=60))
    backend.train_step(expected.batch, LOSS)
    assert "lm_head.weight" in expected.grads
    assert relative_error(grads_of(backend), expected.grads) <= 1e-5


@pytest.mark.parametrize("share_prefix", [True, False])
def test_gradient_parity_long_blocks_which_use_sdpa_get_the_reference_gradient(
    tiny_model: Path, share_prefix: bool
) -> None:
    expected = reference(tiny_model, 2, torch.float32, groups=2, prompt=(100, 120), response=(30, 200))
    backend = TorchBackend(make_spec(tiny_model, share_prefix=share_prefix))
    backend.train_step(expected.batch, LOSS)
    assert relative_error(grads_of(backend), expected.grads) <= 1e-5


def test_gradient_parity_order_of_arrival_does_not_change_a_bit(tiny_model: Path) -> None:
    batch = reference(tiny_model, 3, torch.float32).batch
    turned = TrainingBatch(samples=batch.samples[::-1], temperature=batch.temperature)
    results = []
    for samples in (batch, turned):
        backend = TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=40))
        results.append((backend.train_step(samples, LOSS), grads_of(backend)))
    (first, grads), (second, other_grads) = results
    assert first.loss == second.loss
    assert all(torch.equal(grads[n], other_grads[n]) for n in grads)
    assert all((a == b).all() for a, b in zip(first.logprobs, second.logprobs[::-1], strict=True))


def test_gradient_parity_prefix_sharing_puts_each_prompt_through_the_network_once(tiny_model: Path) -> None:
    batch = reference(tiny_model, 4, torch.float32).batch
    shared, alone = (
        TorchBackend(make_spec(tiny_model, share_prefix=share)).train_step(batch, LOSS).num_tokens
        for share in (True, False)
    )
    prompts = {sample.unit: sample.prefix_length for sample in batch.samples}
    assert alone == sum(len(sample) - 1 for sample in batch.samples)
    assert shared == alone - 3 * sum(prompts.values())  # groups of four


@pytest.mark.slow
@pytest.mark.parametrize("share_prefix", [True, False])
def test_gradient_parity_the_default_model_gets_the_reference_gradient(default_model: Path, share_prefix: bool) -> None:
    shape = {"groups": 2, "group_size": 3, "prompt": (30, 40), "response": (8, 32), "vocab": 40_000}
    expected = reference(default_model, 5, torch.float32, **shape)
    settings = {"share_prefix": share_prefix, "max_tokens_per_micro_batch": 150, "num_threads": None}
    backend = TorchBackend(make_spec(default_model, **settings))
    result = backend.train_step(expected.batch, LOSS)
    assert abs(result.loss - expected.loss) <= 2e-4 * result.metrics["policy/loss_scale"]
    assert relative_error(grads_of(backend), expected.grads) <= 2e-4
