"""Weights of earlier policy versions, kept by a trainer and computed with again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import UnsupportedError
from roll.training import TorchBackend
from roll.training.memory.snapshots import Snapshots
from roll.types import ForwardOptions

SHAPE: dict[str, Any] = {"groups": 2, "group_size": 2}


def said(trainer: TorchBackend, version: int | None = None) -> list[np.ndarray]:
    return trainer.forward(make_batch(**SHAPE), ["logprobs"], ForwardOptions(version=version))["logprobs"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_policy_snapshots_say_the_bits_of_their_version_and_change_nothing(
    tiny_model: Path, dtype: str, lora: bool
) -> None:
    spec = make_spec(tiny_model, dtype=dtype)
    if lora:
        spec = dataclasses.replace(spec, model=spec.model.model_copy(update={"lora": LoRAConfig(rank=2)}))
    trainer, twin = TorchBackend(spec), TorchBackend(spec)
    seen: dict[int, list[np.ndarray]] = {}
    for version in range(4):
        seen[version] = said(trainer)
        trainer.keep_snapshot(version, range(version - 1, version + 1))
        for each in (version - 1, version):
            if each >= 0:
                assert all(map(np.array_equal, said(trainer, each), seen[each]))
        assert all(map(np.array_equal, said(trainer), seen[version]))
        results = [t.train_step(make_batch(version, **SHAPE), PolicyLoss()) for t in (trainer, twin)]
        assert results[0].loss == results[1].loss and results[0].stepped
    assert not all(map(np.array_equal, seen[0], seen[3]))
    weights = zip(trainer.model.parameters(), twin.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)  # as if no snapshot had been used
    with pytest.raises(ValueError, match=r"policy version 1 has no snapshot; available versions: \[2, 3\]"):
        said(trainer, 1)
    kept = trainer._snapshots._kept[3]
    assert all(("lora" in name) == lora for name in kept)  # of adapters alone
    assert {copy.dtype for copy in kept.values()} <= {getattr(torch, dtype), torch.float32}


def test_policy_snapshots_give_the_current_weights_back_where_a_pass_fails() -> None:
    weight = torch.tensor([1.0, 2.0])
    snapshots = Snapshots({"w": weight}, torch.float32)
    snapshots.store(0, [0])
    weight.add_(5.0)
    with pytest.raises(RuntimeError, match="out of memory"), snapshots.activate(0):
        assert weight.tolist() == [1.0, 2.0]
        raise RuntimeError("out of memory")
    assert weight.tolist() == [6.0, 7.0]


def test_policy_snapshots_that_nothing_needs_are_let_go() -> None:
    snapshots = Snapshots({"w": torch.zeros(1)}, torch.float32)
    for version in range(6):
        snapshots.store(version, range(version - 2, version + 1))
        assert snapshots.versions == tuple(range(max(version - 2, 0), version + 1))
    snapshots.store(6, [])
    assert snapshots.versions == ()


def test_policy_snapshots_of_a_role_that_is_not_trained_are_refused(tiny_model: Path) -> None:
    reference = TorchBackend(dataclasses.replace(make_spec(tiny_model), role="reference"))
    with pytest.raises(UnsupportedError, match="reference"):
        reference.keep_snapshot(0, [0])
