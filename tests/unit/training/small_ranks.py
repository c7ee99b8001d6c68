"""What two ranks do in their processes for `test_small_ranks.py`; rank 0 writes down what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from training_helpers import grads_of, make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.training import TorchBackend
from roll.training.precision import Precision

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "dp_shard": {}, "tp": {"tp": 2}}


def work(model: Path, directory: Path, layout: str, **ranks: Any) -> dict[str, Any]:
    """A step over a base in 4 bits; and with moments in 8 bits a step, a checkpoint, and another step, twice."""

    def build(**settings: Any) -> TorchBackend:
        spec = make_spec(model, parallel=ParallelConfig(**LAYOUTS[layout]), epsilon=1e-3, **settings)
        return TorchBackend(dataclasses.replace(spec, **ranks), precision=DOUBLE)

    found: dict[str, Any] = {}
    if layout != "tp":
        adapted = build(lora=LoRAConfig(rank=2, base="nf4"))
        adapted.train_step(make_batch(0), PolicyLoss())
        found["4 bits"] = grads_of(adapted)
        found["sent"] = {name: tensor for name, tensor in adapted.weights() if tensor is not None}
    backend = build(optimizer="adamw_8bit")
    backend.train_step(make_batch(0), PolicyLoss())
    backend.save(directory / layout)
    found["weights"] = {name: tensor.clone() for name, tensor in backend.weights() if tensor is not None}
    again = build(optimizer="adamw_8bit")
    again.load(directory / layout)
    for each in (backend, again):
        each.train_step(make_batch(1), PolicyLoss())
    found["straight"], found["resumed"] = (
        {name: tensor.clone() for name, tensor in each.weights() if tensor is not None} for each in (backend, again)
    )
    return found


def run_rank(rank: int, directory: Path, model: Path) -> None:
    """Both layouts of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    for layout in ("dp_shard", "tp"):
        found = work(model, directory, layout, **ranks)
        if rank == 0:
            torch.save(found, directory / f"{layout}.pt")
    torch.distributed.destroy_process_group()
