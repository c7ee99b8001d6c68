"""The program of two FSDP ranks for `test_adapter_snapshot.py`; rank 0 writes the results to a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.training import TorchBackend
from roll.training.adapter_snapshot import AdapterSpec

SPEC = AdapterSpec(rank=2, alpha=6.0, seed=5)
LORA = LoRAConfig(rank=3, alpha=6.0)
"""Its rows are not divisible by the number of ranks."""


def run_rank(rank: int, directory: Path, model: Path, parallel: dict[str, int], num_ranks: int) -> None:
    spec = make_spec(model, lora=LORA, weight_decay=0.1, parallel=parallel)
    meeting = f"file://{directory / 'meeting'}"
    backend = TorchBackend(dataclasses.replace(spec, rank=rank, world_size=num_ranks, init_method=meeting))
    found = train_two(backend)
    if rank == 0:
        torch.save(found, directory / "found.pt")


def train_two(backend: TorchBackend) -> dict[str, Any]:
    """Train an adapter, copy it, and train both; their snapshots, and the log-probs of a batch."""
    backend.put_adapter("one", SPEC)
    backend.use_adapter("one")
    for seed in (1, 2):
        assert backend.train_step(make_batch(seed), PolicyLoss()).stepped
    first = backend.read_adapter("one")
    backend.put_adapter("two", first)
    backend.use_adapter("two")
    logprobs = backend.measure(make_batch(4), PolicyLoss()).logprobs
    assert backend.train_step(make_batch(3), PolicyLoss()).stepped
    backend.use_adapter("one")
    assert backend.train_step(make_batch(3), PolicyLoss()).stepped
    return {"first": first, "one": backend.read_adapter("one"), "two": backend.read_adapter("two"), "rows": logprobs}
