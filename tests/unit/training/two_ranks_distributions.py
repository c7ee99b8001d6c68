"""What two FSDP ranks do in their processes for `test_two_ranks_distributions.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from training_helpers import grads_of, logprobs_of, make_batch, make_spec

from roll.algorithms.correction import Correction
from roll.algorithms.losses import AttentionCreditLoss, PolicyLoss
from roll.config.model import LoRAConfig
from roll.training import TorchBackend
from roll.training.precision import Precision
from roll.types import AttentionRange, ForwardOptions

SMALL = {"max_tokens_per_micro_batch": 30}
BARE = Correction(upper=None)
PLAIN = PolicyLoss(correction=BARE)
BOTH = PolicyLoss(correction=BARE, entropy_coefficient=0.3, kl_coefficient=0.2, kl_estimator="full")
CASES: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointing": {"dtype": "float64", "activation_checkpointing": True},
    "lora": {"dtype": "float64", "lora": LoRAConfig(rank=2), "learning_rate": 0.02},
}
RANGE = AttentionRange(window=4, horizon=(2, 7))


def work(case: str, model: Path, **ranks: Any) -> dict[str, Any]:
    """What one rank finds: the same calls, alone or as one of two."""
    settings = dict(CASES[case])
    precision = Precision.from_name(settings.pop("dtype")) if case != "bfloat16" else None
    spec = dataclasses.replace(make_spec(model, **SMALL, **settings), holds_reference=True, **ranks)
    backend = TorchBackend(spec, precision=precision)
    batch, found = make_batch(2), {}
    if case == "lora":  # FSDP sees the adapters for the first time while they are off
        found["below"] = logprobs_of(backend, batch, adapter=False)
    backend.train_step(make_batch(1), PLAIN)
    found["result"] = backend.train_step(batch, BOTH)
    found["grads"] = grads_of(backend)
    observed = ForwardOptions(attention=RANGE)
    found["statistics"] = backend.forward(batch, ["logprobs", "attention"], observed)["attention"]
    one = dataclasses.replace(batch, samples=batch.samples[:1])
    alone = backend.forward(one, ["logprobs", "attention"], observed)  # the other rank has nothing to do
    found["one"] = alone["attention"]
    found["then"] = backend.train_step(make_batch(3), AttentionCreditLoss(loss=BOTH, range=RANGE))
    if case == "lora":
        found["still below"] = logprobs_of(backend, batch, adapter=False)
    found["kept"] = by_snapshot(backend)
    return found


def by_snapshot(backend: TorchBackend) -> dict[str, list[Any]]:
    """Log-probs before an update, after it, by a snapshot from before it, and after it once more."""
    batch = make_batch(2)
    before = logprobs_of(backend, batch)
    backend.keep_snapshot(0, [0])
    backend.train_step(make_batch(4), PLAIN)
    after = logprobs_of(backend, batch)
    kept = backend.forward(batch, ["logprobs"], ForwardOptions(version=0))["logprobs"]
    return {"before": before, "after": after, "kept": kept, "again": logprobs_of(backend, batch)}


def run_rank(rank: int, directory: Path, model: Path) -> None:
    """Every case in turn, as one of two ranks."""
    meeting = f"file://{directory / 'meeting'}"
    for case in CASES:
        found = work(case, model, rank=rank, world_size=2, init_method=meeting)
        torch.save(found, directory / f"{case}-{rank}.pt")
    torch.distributed.destroy_process_group()
