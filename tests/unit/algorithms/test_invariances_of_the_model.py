"""Every preset through the real trainer and a tiny model: packing, micro-batches, order, masked tokens and ranks
leave loss and gradient as a padded pass over the whole batch gives them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from model_helpers import STILL, batch_of, disturbed, loss_of, padded_gradient, run_rank
from training_helpers import grads_of, make_spec, relative_error

from roll.config.presets import PRESET_NAMES
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import TrainingBatch

LIMIT = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro-batches": {"max_tokens_per_micro_batch": 40},
    "each alone": {"share_prefix": False, "max_tokens_per_micro_batch": 1},
}


@pytest.fixture(scope="module", name="model")
def _model(tiny_model: Path) -> Any:
    return load_causal_lm(tiny_model, torch.float32, attention="eager")


@pytest.fixture(scope="module", name="backends")
def _backends(tiny_model: Path) -> dict[str, TorchBackend]:
    return {name: TorchBackend(make_spec(tiny_model, **STILL, **layout)) for name, layout in LAYOUTS.items()}


def learn(backend: TorchBackend, name: str, batch: TrainingBatch) -> tuple[float, dict[str, torch.Tensor], Any]:
    result = backend.train_step(batch, loss_of(name))
    return result.loss, grads_of(backend), result.metrics


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_layout_order_and_masked_tokens_change_nothing(
    name: str, model: Any, backends: dict[str, TorchBackend]
) -> None:
    batch = batch_of(name, model)
    expected_loss, expected = padded_gradient(model, batch, loss_of(name))
    shuffled = list(batch.samples)
    random.Random(name).shuffle(shuffled)
    mixed = replace(batch, samples=tuple(shuffled))
    found = {}
    for layout, backend in backends.items():
        found[layout] = learn(backend, name, mixed if layout == "micro-batches" else batch)
        loss, grads, metrics = found[layout]
        assert abs(loss - expected_loss) <= LIMIT * max(metrics["policy/loss_scale"], abs(expected_loss)), layout
        assert relative_error(grads, expected) <= LIMIT, layout
    loss, grads, _ = learn(backends["each alone"], name, disturbed(batch, seed=1))
    assert loss == found["each alone"][0]
    assert all(torch.equal(grads[n], found["each alone"][1][n]) for n in grads)


def test_two_ranks_find_the_gradient_of_one(tiny_model: Path, model: Any, tmp_path: Path) -> None:
    batches = {name: batch_of(name, model) for name in PRESET_NAMES}
    mp.spawn(run_rank, (tmp_path, tiny_model, batches), nprocs=2)  # type: ignore[no-untyped-call]
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for name, batch in batches.items():
        expected_loss, expected = padded_gradient(model, batch, loss_of(name))
        loss, metrics, grads = found[name]
        assert abs(loss - expected_loss) <= LIMIT * max(metrics["policy/loss_scale"], abs(expected_loss)), name
        assert relative_error(grads, expected) <= LIMIT, name
