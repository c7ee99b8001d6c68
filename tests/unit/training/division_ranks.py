"""The program of the four ranks of `test_division.py`: the same steps on whole and on divided batches."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parallel_ranks import whole_grads
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.algorithms.losses.distillation import TopKDistillationLoss
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend
from roll.training.packing.division import RankShare, divide_batch, restore_batch
from roll.types import ForwardOptions, TopLogprobs, TrainingBatch, TrainingSample

NUM_RANKS = 4
NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 2, 4, 2
"""Sizes of the model `qwen3-moe` of `families`."""
TOP = 64
LAYOUTS: dict[str, dict[str, int]] = {"dp 4": {}, "pp 2, dp 2": {"pp": 2}}
REPLAY = PolicyLoss(entropy_coefficient=0.3)


def add_heavy_columns(sample: TrainingSample, rng: np.random.Generator) -> TrainingSample:
    """Experts that a router could have chosen, different for each sample, and top-k log-probs of a teacher."""
    chosen = rng.random((len(sample), NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :NUM_CHOSEN].astype(np.int8)
    chosen[rng.random((len(sample), NUM_LAYERS)) < 0.2] = -1
    ids = rng.permuted(np.tile(np.arange(260, dtype=np.int32), (len(sample), 1)), axis=1)[:, :TOP]
    logprobs = np.log(np.full((len(sample), TOP), 0.9 / TOP, dtype=np.float32))
    top = TopLogprobs(token_ids=ids, logprobs=logprobs)
    return dataclasses.replace(sample, experts=chosen, teacher_top=top)


def heavy_batch(seed: int = 0, **settings: Any) -> TrainingBatch:
    rng = np.random.default_rng(seed)
    batch = make_batch(seed, **settings)
    return dataclasses.replace(batch, samples=tuple(add_heavy_columns(s, rng) for s in batch.samples))


def send(batch: TrainingBatch, work: Any, shares: list[RankShare], own: RankShare) -> tuple[TrainingBatch, int]:
    """The batch as one rank gets it, and the number of serialized bytes."""
    divided = divide_batch(batch, work, shares)
    assert divided is not None
    parts = [pickle.dumps(part, 5) for part in (divided.outline, divided.get_columns(own))]
    return restore_batch(*map(pickle.loads, parts)), sum(map(len, parts))


def run_rank(rank: int, directory: Path, model: Path) -> None:
    """Every layout; whole and divided batches must give the same bits."""
    for layout, parallel in LAYOUTS.items():
        found = work(directory, model, layout, parallel, rank)
        torch.save(found, directory / f"{layout}-{rank}.pt")
    torch.distributed.destroy_process_group()


def work(directory: Path, model: Path, layout: str, parallel: dict[str, int], rank: int) -> dict[str, Any]:
    spec = dataclasses.replace(
        make_spec(model, parallel=ParallelConfig(**parallel), max_tokens_per_micro_batch=60),
        rank=rank,
        world_size=NUM_RANKS,
        init_method=f"file://{directory / 'meeting'}",
    )
    whole, part = TorchBackend(spec), TorchBackend(spec)
    own = part.batch_share
    assert own is not None
    shares: list[Any] = [None] * NUM_RANKS
    torch.distributed.all_gather_object(shares, own)
    found: dict[str, Any] = {"share": own, "same": True, "bytes": {}}
    for seed, loss in enumerate((REPLAY, TopKDistillationLoss())):
        batch = heavy_batch(seed)
        sent, size = send(batch, loss, shares, own)
        found["bytes"][type(loss).__name__] = size, len(pickle.dumps(batch, 5))
        a, b = whole.train_step(batch, loss), part.train_step(sent, loss)
        grads, others = whole_grads(whole), whole_grads(part)
        found["same"] &= (a.loss, a.grad_norm, a.metrics) == (b.loss, b.grad_norm, b.metrics)
        found["same"] &= all(torch.equal(others[name], grad) for name, grad in grads.items())
        found["same"] &= all(np.array_equal(x, y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
    outputs, options = ["logprobs", "top_logprobs", "experts"], ForwardOptions(num_top=3)
    sent, found["bytes"]["forward"] = send(batch, outputs, shares, own)
    a, b = whole.forward(batch, outputs, options), part.forward(sent, outputs, options)
    for name in ("logprobs", "experts"):
        found["same"] &= all(np.array_equal(x, y) for x, y in zip(a[name], b[name], strict=True))
    found["same"] &= all(
        np.array_equal(x.logprobs, y.logprobs) for x, y in zip(a["top_logprobs"], b["top_logprobs"], strict=True)
    )
    # One sample with an expert that the model does not have: every rank says so, also those without the sample.
    wrong = dataclasses.replace(batch.samples[0], experts=np.full_like(batch.samples[0].experts, NUM_EXPERTS))
    sent, _ = send(dataclasses.replace(batch, samples=(wrong, *batch.samples[1:])), REPLAY, shares, own)
    try:
        part.train_step(sent, REPLAY)
    except ModelError as error:
        found["error"] = str(error)
    return found
