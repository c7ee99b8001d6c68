"""What two ranks do with every family for `test_families_divided.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES
from parallel_ranks import DOUBLE, FULL
from training_helpers import grads_of, make_batch, make_spec

from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend

WAYS: dict[str, dict[str, int]] = {"dp": {}, "tp": {"tp": 2}, "cp": {"cp": 2}}


def steps(name: str, model: Path, parallel: Mapping[str, int], **ranks: Any) -> list[dict[str, torch.Tensor]] | str:
    """Gradients of two updates, or why the family is refused."""
    spec = make_spec(model, max_tokens_per_micro_batch=60, parallel=ParallelConfig(**parallel))
    precision = None if FAMILIES[name].moe else DOUBLE  # grouped products are not there in float64
    try:
        backend = TorchBackend(dataclasses.replace(spec, holds_reference=True, **ranks), precision=precision)
        found = []
        for seed in range(2):
            backend.train_step(make_batch(seed), FULL)
            found.append(grads_of(backend))
    except ModelError as error:
        return str(error)
    return found


def run_rank(rank: int, directory: Path) -> None:
    """Every family in every way, as one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    found = {
        (name, way): steps(name, directory / name, sizes, **ranks) for name in FAMILIES for way, sizes in WAYS.items()
    }
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()
