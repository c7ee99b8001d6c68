"""Critics, batches with returns, and an independent reference for their gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_helpers import grads_of, make_batch, make_spec, values_of

from roll.algorithms.losses import ValueLoss
from roll.models import load_causal_lm
from roll.training import TorchBackend, TrainerSpec
from roll.training.precision import Precision
from roll.types import TrainingBatch

VALUE_LOSS = ValueLoss(clip=0.5)


def critic_spec(model: Path, **settings: Any) -> TrainerSpec:
    """A critic of one rank on one thread; settings as of `make_spec`."""
    return dataclasses.replace(make_spec(model, **settings), role="critic")


def valued(batch: TrainingBatch, seed: int = 0) -> TrainingBatch:
    """The same rollouts with random returns and old values; junk where the loss counts no token."""
    rng = np.random.default_rng(seed)
    samples = []
    for sample in batch.samples:
        returns, old = (rng.normal(0, 1, len(sample)).astype(np.float32) for _ in range(2))
        junk = np.where(sample.loss_mask, 0, 1e6).astype(np.float32)
        samples.append(dataclasses.replace(sample, returns=returns + junk, old_values=old + junk))
    return dataclasses.replace(batch, samples=tuple(samples))


def reference_gradient(
    path: Path, batch: TrainingBatch, weight: torch.Tensor, bias: float, *, clip: float | None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the clipped value loss in float64, sample by sample, by transformers alone."""
    model = load_causal_lm(path, torch.float64, attention="sdpa")
    head = weight.clone().requires_grad_()
    constant = torch.tensor([bias], dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        assert sample.returns is not None and sample.old_values is not None
        for token in np.flatnonzero(sample.loss_mask):
            value = hidden[token - 1] @ head + constant[0]
            target, old = float(sample.returns[token]), float(sample.old_values[token])
            error = (value - target) ** 2
            if clip is not None:
                error = torch.maximum(error, (value.clamp(old - clip, old + clip) - target) ** 2)
            total = total + 0.5 * error
    loss = total / batch.num_loss_tokens
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert head.grad is not None and constant.grad is not None
    return loss.item(), grads | {"score.weight": head.grad[None], "score.bias": constant.grad}


def run_critic_rank(rank: int, directory: Path, model: Path) -> None:
    """Everything that one of two ranks does, in order; all ranks must make the same calls."""
    found: dict[str, Any] = {}
    meeting = f"file://{directory / 'meeting'}"

    def build(precision: Precision | None = None) -> TorchBackend:
        spec = critic_spec(model, max_tokens_per_micro_batch=30)
        return TorchBackend(
            dataclasses.replace(spec, rank=rank, world_size=2, init_method=meeting), precision=precision
        )

    for name, precision in (("float64", Precision.from_name("float64")), ("float32", None)):
        backend = build(precision)
        for seed in (3, 4):
            result = backend.train_step(valued(make_batch(seed)), VALUE_LOSS)
        found[name] = {"result": result, "grads": grads_of(backend)}
    found["values"] = values_of(backend, make_batch(5))
    backend.save(directory / "saved by two")
    backend.export(directory / "export")
    backend.load(directory / "saved by one")
    found["values after loading one"] = values_of(backend, make_batch(5))
    torch.save(found, directory / f"found-{rank}.pt")
    backend.close()
