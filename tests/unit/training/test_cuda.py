"""On a CUDA device the trainer gives what it gives on the host, and lends its memory."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_same_gradient import LOSS, reference
from training_helpers import grads_of, make_batch, make_spec, needs_cuda, relative_error
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.training import TorchBackend
from roll.training.memory import activation_offload

pytestmark = [pytest.mark.gpu, needs_cuda]


def on_cuda(model: Path, **settings: Any) -> TorchBackend:
    return TorchBackend(dataclasses.replace(make_spec(model, **settings), device="cuda"))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_cuda_gradients_in_float32_equal_the_reference_of_the_host(tiny_model: Path, share_prefix: bool) -> None:
    expected = reference(tiny_model, 0, torch.float32)
    backend = on_cuda(tiny_model, share_prefix=share_prefix, max_tokens_per_micro_batch=45)
    backend.train_step(expected.batch, LOSS)
    grads = {name: grad.cpu() for name, grad in grads_of(backend).items()}
    assert relative_error(grads, expected.grads) <= 1e-4


def test_cuda_bfloat16_through_varlen_attention_is_as_near_as_on_the_host(tiny_model: Path) -> None:
    batch = make_batch(7)  # ratios of 1: no clipping edge for rounding to cross
    exact = TorchBackend(make_spec(tiny_model))
    backend = on_cuda(tiny_model, dtype="bfloat16")
    for trainer in (exact, backend):
        trainer.train_step(batch, PolicyLoss())
    assert relative_error({n: g.cpu() for n, g in grads_of(backend).items()}, grads_of(exact)) <= 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_offloading_frees_the_device_and_reloading_goes_on_as_if_nothing_happened(
    tmp_path: Path, dtype: str
) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=512, heads=8, kv_heads=4)
    moved, left = (on_cuda(model, dtype=dtype) for _ in range(2))
    for backend in (moved, left):
        backend.train_step(make_batch(), PolicyLoss())
    before = torch.cuda.memory_allocated()
    moved.offload(["parameters", "optimizer"])
    weights = sum(p.numel() for p in moved.masters.parameters.values())
    assert before - torch.cuda.memory_allocated() > 11 * weights  # at least weight and two moments in float32
    moved.onload(["parameters", "optimizer"])
    results = [backend.train_step(make_batch(1), PolicyLoss()) for backend in (moved, left)]
    limit = 1e-3 if dtype == "float32" else 2e-2  # kernels add up in any order, and AdamW's first steps go by signs
    assert results[0].loss == pytest.approx(results[1].loss, rel=limit, abs=limit)
    assert relative_error(dict(moved.weights()), dict(left.weights())) <= limit


def test_cuda_offloaded_states_and_activations_leave_the_device_and_change_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=512, heads=8, kv_heads=4)
    both = {"offload_optimizer": True, "offload_activations": True}
    found: list[tuple[float, int, int]] = []
    for settings in ({}, both):
        gc.collect()
        before = torch.cuda.memory_allocated()
        backend = on_cuda(model, dtype="bfloat16", max_tokens_per_micro_batch=60, **settings)
        with mock.patch.object(activation_offload, "MIN_OFFLOAD_BYTES", 1):
            results = [backend.train_step(make_batch(seed), PolicyLoss()) for seed in range(3)]
        weights = sum(p.numel() for p in backend.masters.parameters.values())
        found.append((results[-1].loss, torch.cuda.memory_allocated() - before, weights))
        del backend
    (loss, kept, weights), (other, less, _) = found
    assert other == pytest.approx(loss, rel=1e-2, abs=1e-2)
    assert kept - less > 11 * weights  # masters and moments, at least


def test_cuda_state_saved_on_the_device_loads_on_the_host(tiny_model: Path, tmp_path: Path) -> None:
    backend = on_cuda(tiny_model)
    backend.train_step(make_batch(), PolicyLoss())
    backend.save(tmp_path / "trainer")
    host = TorchBackend(make_spec(tiny_model))
    host.load(tmp_path / "trainer")
    assert all(torch.equal(a.cpu(), b) for (_, a), (_, b) in zip(backend.weights(), host.weights(), strict=True))
