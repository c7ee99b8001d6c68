"""What ranks do in their processes for `test_fp8_ranks.py`; rank 0 writes down what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from training_helpers import grads_of, logprobs_of, make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.parallel import ParallelConfig
from roll.training import TorchBackend

LAYOUTS: dict[str, dict[str, int]] = {"dp_shard": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}
RECIPES = ("none", "rowwise_with_gw_hp", "rowwise")


def work(model: Path, layout: dict[str, int], **ranks: Any) -> dict[str, Any]:
    """By recipe: log-probs, weights after a step and, where one stage has all, gradients."""
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        spec = make_spec(model, dtype="bfloat16", fp8=recipe, parallel=ParallelConfig(**layout), epsilon=1e-2)
        backend = TorchBackend(dataclasses.replace(spec, **ranks))
        logprobs = logprobs_of(backend, make_batch())
        backend.train_step(make_batch(), PolicyLoss())
        grads = grads_of(backend) if "pp" not in layout else {}
        weights = {name: tensor.clone() for name, tensor in backend.weights() if tensor is not None}
        found[recipe] = {"logprobs": logprobs, "grads": grads, "weights": weights}
    return found


def run_rank(rank: int, directory: Path, model: Path) -> None:
    """Every layout of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    for name, layout in LAYOUTS.items():
        found = work(model, layout, **ranks)
        if rank == 0:
            torch.save(found, directory / f"{name}.pt")
    torch.distributed.destroy_process_group()
