"""What two FSDP ranks do in their processes for `test_two_ranks.py`; rank 0 writes down what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from training_helpers import branching_batch, grads_of, logprobs_of, make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.training import TorchBackend
from roll.training.packing import blocks
from roll.training.precision import Precision
from roll.types import TrainingBatch

LOSS = PolicyLoss(kl_coefficient=0.1)
LORA = LoRAConfig(rank=2)
DORA = LoRAConfig(rank=2, use_dora=True, use_rslora=True, rank_pattern={"k_proj": 3}, loraplus_lr_ratio=4.0)
SMALL = {"max_tokens_per_micro_batch": 30}


def run_rank(rank: int, directory: Path, model: Path, batch: TrainingBatch) -> None:
    """Everything that a rank does, in order; all ranks must make the same calls."""
    found: dict[str, Any] = {}
    meeting = f"file://{directory / 'meeting'}"

    def build(precision: Precision | None = None, **settings: Any) -> TorchBackend:
        spec = dataclasses.replace(make_spec(model, **settings), rank=rank, world_size=2, init_method=meeting)
        return TorchBackend(spec, precision=precision)

    double = Precision(compute=torch.float64, master=torch.float64)
    for name, precision, settings in (
        ("float32", None, SMALL),
        ("float64", double, SMALL),
        ("checkpointing", None, {"activation_checkpointing": True, **SMALL}),
        ("lora", None, {"lora": LORA, **SMALL}),
        ("dora", None, {"lora": DORA, **SMALL}),
    ):
        backend = build(precision, **settings)
        result = backend.train_step(batch, LOSS)
        found[name] = {"result": result, "grads": grads_of(backend)}
        if "lora" in settings:
            second = backend.train_step(make_batch(2), PolicyLoss())
            found[f"{name} second"] = {"result": second, "weights": list(backend.weights())}
            found[f"{name} second"]["adapter"] = list(backend.adapter_weights())

    with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 2):
        backend = build(double, **SMALL)
        result = backend.train_step(branching_batch(), PolicyLoss(ratio_level="sequence"))
        found["branching"] = {"result": result, "grads": grads_of(backend)}

    backend = build(dtype="bfloat16", **SMALL)
    backend.train_step(make_batch(7), PolicyLoss())  # ratios of 1: no clipping edge for rounding to cross
    found["bfloat16"] = grads_of(backend)

    backend = build(**SMALL)
    one = dataclasses.replace(batch, samples=batch.samples[:1])
    found["idle rank"] = {"result": backend.train_step(one, LOSS), "grads": grads_of(backend)}
    found["logprobs"] = logprobs_of(backend, batch)
    found["weights"] = list(backend.weights())
    backend.save(directory / "saved by two")
    backend.export(directory / "export")
    found["after saving"] = {"result": backend.train_step(make_batch(5), PolicyLoss())}
    found["after saving"]["weights"] = list(backend.weights())
    torch.rand(3)
    backend.load(directory / "saved by two")
    found["after loading"] = {"result": backend.train_step(make_batch(5), PolicyLoss())}
    backend.load(directory / "saved by one")
    found["steps"] = backend.num_steps
    found["after loading one"] = {"result": backend.train_step(make_batch(5), PolicyLoss())}
    found["after loading one"]["weights"] = list(backend.weights())

    torch.save(found, directory / f"found-{rank}.pt")
    backend.close()


def run_once(rank: int, directory: Path, model: Path, batch: TrainingBatch) -> None:
    """One step of a rank; rank 0 writes down its result and gradients."""
    spec = make_spec(model, max_tokens_per_micro_batch=100)
    meeting = f"file://{directory / 'meeting'}"
    backend = TorchBackend(dataclasses.replace(spec, rank=rank, world_size=2, init_method=meeting))
    result = backend.train_step(batch, LOSS)
    grads = grads_of(backend)
    if rank == 0:
        torch.save((result, grads), directory / "found.pt")
    backend.close()
