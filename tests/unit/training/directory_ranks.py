"""What two ranks do in their processes for `test_model_directories.py`; rank 0 writes down what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend

LAYOUTS = {"dp_shard": ParallelConfig(), "tp": ParallelConfig(tp=2), "pp": ParallelConfig(pp=2)}


def train(directory: Path, layout: str = "dp_shard", **ranks: Any) -> TorchBackend:
    """Build a trainer of a model and take a step."""
    spec = make_spec(directory, parallel=LAYOUTS[layout])
    backend = TorchBackend(dataclasses.replace(spec, **ranks))
    backend.train_step(make_batch(0), PolicyLoss())
    return backend


def run_rank(rank: int, meeting: Path, trained: dict[str, Path], refused: dict[str, Path], exports: Path) -> None:
    """Train each directory under each layout and export what came out; note how the others are refused."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{meeting}"}
    for layout in LAYOUTS:
        for kind, directory in trained.items():
            train(directory, layout, **ranks).export(exports / layout / kind)
    found = {}
    for kind, directory in refused.items():
        try:
            train(directory, **ranks)
        except ModelError as error:
            found[kind] = str(error)
    torch.save(found, exports / f"refused-{rank}.pt")
    torch.distributed.destroy_process_group()
