"""What two ranks do with every family for `test_families_divided.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES
from parallel_ranks import DOUBLE, FULL, whole_grads
from test_routing import REPLAYED
from training_helpers import make_batch, make_spec

from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend
from roll.types import TrainingBatch

WAYS: dict[str, dict[str, int]] = {
    "dp": {},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "vpp": {"pp": 2, "vpp": 2},
}


def steps(
    name: str, model: Path, parallel: Mapping[str, int], **ranks: Any
) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]] | str:
    """Metrics and gradients of some updates, or why the family is refused."""
    spec = make_spec(model, max_tokens_per_micro_batch=60, parallel=ParallelConfig(**parallel))
    precision = None if FAMILIES[name].moe else DOUBLE  # routers compute in float32 in any case
    try:
        backend = TorchBackend(dataclasses.replace(spec, holds_reference=True, **ranks), precision=precision)
        found = []
        for seed in range(2):
            result = backend.train_step(make_batch(seed), FULL)
            found.append((result.metrics, whole_grads(backend)))
        if name in REPLAYED:
            batch = with_experts(make_batch(2), backend)
            result = backend.train_step(batch, FULL)
            found.append((result.metrics, whole_grads(backend)))
            said = backend.forward(batch, ["logprobs", "experts"])["experts"]
            for sample, own in zip(batch.samples, said, strict=True):
                assert sample.experts is not None
                assert (own[:-1] == sample.experts[:-1]).all()
    except ModelError as error:
        return str(error)
    return found


def kind(name: str, way: str) -> str:
    """The model that is divided: for stages of several parts, one of twice as many layers."""
    return f"{name} deep" if way == "vpp" else name


def with_experts(batch: TrainingBatch, backend: TorchBackend) -> TrainingBatch:
    """Experts for every token, in an order that its id decides."""
    routing = backend.network.routing
    rng = np.random.default_rng(0)
    by_token = rng.permuted(np.tile(np.arange(routing.num_experts), (260, routing.num_layers, 1)), axis=-1)
    chosen = by_token[..., : routing.num_chosen].astype(np.int16)
    samples = (dataclasses.replace(sample, experts=chosen[sample.token_ids]) for sample in batch.samples)
    return dataclasses.replace(batch, samples=tuple(samples))


def run_rank(rank: int, directory: Path) -> None:
    """Every family in every way, as one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    found = {
        (name, way): steps(name, directory / kind(name, way), sizes, **ranks)
        for name in FAMILIES
        for way, sizes in WAYS.items()
    }
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()
