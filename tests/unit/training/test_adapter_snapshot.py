"""Adapters that are created, copied and replaced while the trainer holds others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from snapshot_ranks import LORA, SPEC, run_rank, train_two
from training_helpers import logprobs_of, make_batch, make_spec
from worlds.ranks import run_ranks

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import ModelError, UnsupportedError
from roll.training import TorchBackend
from roll.training.adapter_snapshot import AdapterSnapshot


def trainer(model: Path, rank: int = 8, seed: int = 0) -> TorchBackend:
    return TorchBackend(make_spec(model, lora=LoRAConfig(rank=rank, alpha=6.0), weight_decay=0.1, seed=seed))


def train(backend: TorchBackend, *seeds: int) -> TorchBackend:
    for seed in seeds:
        assert backend.train_step(make_batch(seed), PolicyLoss()).stepped
    return backend


def assert_same(first: TorchBackend, second: TorchBackend, **tolerance: Any) -> None:
    """Compare the merged weights of two trainers."""
    theirs = dict(second.weights())
    for name, tensor in first.weights():
        torch.testing.assert_close(tensor, theirs[name], **tolerance)


def test_adapter_snapshot_of_lower_rank_trains_as_in_a_trainer_of_this_rank(tiny_model: Path) -> None:
    several, alone = trainer(tiny_model, 8), trainer(tiny_model, 2, seed=5)
    train(several, 9)  # the default adapter, which must not matter
    several.put_adapter("client", SPEC)
    several.use_adapter("client")
    assert_same(train(several, 1, 2, 3), train(alone, 1, 2, 3), atol=1e-6, rtol=1e-5)
    several.use_adapter("default")
    assert_same(several, train(trainer(tiny_model, 8), 9), atol=0, rtol=0)  # with the scale of the configuration


def test_adapter_snapshot_resumes_with_and_without_optimizer_state(tiny_model: Path) -> None:
    backend = trainer(tiny_model)
    backend.put_adapter("one", SPEC)
    backend.use_adapter("one")
    train(backend, 1, 2)
    snapshot = backend.read_adapter("one")
    assert snapshot.num_steps == 2
    assert {len(tensor) for name, tensor in snapshot.weights.items() if ".lora_A." in name} == {2}
    other = trainer(tiny_model, rank=3)
    other.put_adapter("copy", snapshot)
    other.put_adapter("fresh", AdapterSnapshot(spec=snapshot.spec, weights=snapshot.weights))
    other.use_adapter("copy")
    train(backend, 3)
    assert_same(train(other, 3), backend, atol=1e-6, rtol=1e-5)
    other.use_adapter("fresh")
    assert other.num_steps == 0
    train(other, 3)
    with pytest.raises(AssertionError):
        assert_same(other, backend, atol=1e-6, rtol=1e-5)


def test_adapter_snapshot_does_not_change_during_training(tiny_model: Path) -> None:
    backend = trainer(tiny_model)
    backend.put_adapter("one", SPEC)
    backend.use_adapter("one")
    snapshot = backend.read_adapter("one")
    before = {name: tensor.clone() for name, tensor in snapshot.weights.items()}
    train(backend, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in snapshot.weights.items())
    backend.put_adapter("one", snapshot)  # while it is in use
    backend.use_adapter("one")
    base = logprobs_of(backend, make_batch(4), adapter=False)
    assert all((a == b).all() for a, b in zip(logprobs_of(backend, make_batch(4)), base, strict=True))


@pytest.mark.parametrize(("part", "kept"), [("attention", ".mlp."), ("mlp", ".self_attn.")])
def test_adapter_snapshot_of_some_layers_changes_only_these_layers(tiny_model: Path, part: str, kept: str) -> None:
    backend = trainer(tiny_model)
    choice = {"attention": part == "attention", "mlp": part == "mlp"}
    backend.put_adapter("part", dataclasses.replace(SPEC, **choice))
    backend.use_adapter("part")
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    train(backend, 1)
    changed = {name for name, tensor in backend.weights() if not torch.equal(tensor, before[name])}
    assert changed and not any(kept in name for name in changed)
    assert not any(kept in name for name in backend.read_adapter("part").weights)


def test_adapter_snapshot_that_does_not_fit_is_rejected(tiny_model: Path) -> None:
    backend = trainer(tiny_model, rank=2)
    with pytest.raises(ModelError, match="must be between 1 and 2, the rank of the trainer, got 3"):
        backend.put_adapter("one", dataclasses.replace(SPEC, rank=3))
    backend.put_adapter("one", SPEC)
    snapshot = backend.read_adapter("one")
    name = next(iter(snapshot.weights))
    lacking = {other: tensor for other, tensor in snapshot.weights.items() if other != name}
    with pytest.raises(ModelError, match=f"lacks tensor '{name}'"):
        backend.put_adapter("one", dataclasses.replace(snapshot, weights=lacking))
    with pytest.raises(ModelError, match="must have the shape"):
        backend.put_adapter("one", dataclasses.replace(snapshot, weights={**lacking, name: torch.zeros(2, 3)}))
    with pytest.raises(UnsupportedError, match="the name is reserved"):
        backend.put_adapter("default", SPEC)
    backend.delete_adapter("one")
    backend.delete_adapter("one")  # twice is safe
    with pytest.raises(UnsupportedError, match=r"the trainer has no model\.lora"):
        TorchBackend(make_spec(tiny_model)).put_adapter("one", SPEC)


@pytest.mark.parametrize("parallel", [{}, {"dp_replicate": 2}])
@pytest.mark.integration
def test_adapter_snapshot_of_several_ranks_equals_one_rank(
    tiny_model: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    alone = train_two(TorchBackend(make_spec(tiny_model, lora=LORA, weight_decay=0.1)))
    run_ranks(run_rank, (tmp_path, tiny_model, parallel, 2), 2)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for mine, theirs in zip(found["rows"], alone["rows"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for name in ("first", "one", "two"):
        one, several = alone[name], found[name]
        assert (several.num_steps, several.steps) == (one.num_steps, one.steps)
        assert several.weights.keys() == one.weights.keys()
        for key, weight in one.weights.items():
            torch.testing.assert_close(several.weights[key], weight, atol=1e-5, rtol=1e-4)
            for label, moment in one.moments[key].items():
                torch.testing.assert_close(several.moments[key][label], moment, atol=1e-5, rtol=1e-3)
    for key, weight in found["one"].weights.items():
        assert torch.equal(weight, found["two"].weights[key])  # a copy continues exactly


@pytest.mark.integration
def test_adapter_snapshot_with_tp_or_pp_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
    for parallel, message in (({"pp": 2}, "has several pipeline stages"), ({"tp": 2}, "without tp and ep only")):
        directory = tmp_path / "".join(parallel)
        directory.mkdir()
        with pytest.raises(Exception, match=message):
            run_ranks(run_rank, (directory, tiny_model, parallel, 2), 2)
