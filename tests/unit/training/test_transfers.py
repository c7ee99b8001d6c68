"""Copies of inputs to a device: one for all tensors of a structure, with their values and dtypes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.models import transfers
from roll.training import TorchBackend

META = torch.device("meta")


@dataclass(frozen=True)
class Inputs:
    """A structure as the trainer's inputs are."""

    ids: Tensor
    missing: Tensor | None
    parts: dict[str, list[Tensor]]
    size: tuple[int, int]


def copy_on_cpu(inputs: Any, device: torch.device) -> Any:
    """Move a structure as to a CUDA device, but to the CPU."""
    found: list[Tensor] = []
    transfers._map_tensors(inputs, lambda tensor: found.append(tensor) or tensor)
    moved = iter(transfers._copy_together(found, device))
    return transfers._map_tensors(inputs, lambda tensor: next(moved))


@pytest.fixture(autouse=True)
def _without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_allocate_pinned", lambda size: torch.empty(size, dtype=torch.uint8))


def test_transfers_of_a_structure_use_one_aligned_copy() -> None:
    inputs = Inputs(
        ids=torch.arange(5),
        missing=None,
        parts={"bias": [torch.tensor([[0.5, -float("inf")]]), torch.zeros(0)], "mask": [torch.tensor([True, False])]},
        size=(1, 2),
    )
    moved = copy_on_cpu(inputs, torch.device("cpu"))
    assert moved.missing is None
    assert moved.size == (1, 2)
    found = [moved.ids, *moved.parts["bias"], *moved.parts["mask"]]
    for own, before in zip(found, [inputs.ids, *inputs.parts["bias"], *inputs.parts["mask"]], strict=True):
        assert own.dtype == before.dtype
        assert torch.equal(own, before)
        assert own.data_ptr() % 8 == 0
    starts = [own.storage_offset() * own.element_size() for own in found]
    assert starts == [0, 64, 128, 128]  # 40, 8, 0 and 2 bytes, each from the next multiple of 64
    assert len({own.untyped_storage().data_ptr() for own in found}) == 1


def test_transfers_to_the_cpu_return_the_same_tensors() -> None:
    inputs = {"ids": torch.arange(3)}
    assert transfers.move_to_device(inputs, torch.device("cpu")) is inputs


def test_transfers_of_structures_without_tensors_return_them() -> None:
    assert transfers.move_to_device({"rows": None, "size": 3}, META) == {"rows": None, "size": 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transfers_of_micro_batches_do_not_change_the_update(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    batch = make_batch()
    known = [
        dataclasses.replace(s, old_logprobs=np.where(s.loss_mask, -5.2, 0).astype(np.float32)) if i % 3 else s
        for i, s in enumerate(batch.samples)
    ]
    batch = dataclasses.replace(batch, samples=tuple(known))

    def train() -> tuple[list[float], list[Tensor]]:
        backend = TorchBackend(make_spec(tiny_model, dtype=dtype, max_tokens_per_micro_batch=60))
        losses = [backend.train_step(batch, PolicyLoss()).loss for _ in range(2)]
        return losses, [parameter.detach().clone() for parameter in backend.network.parameters()]

    expected = train()
    for module in ("attention.plan", "network.loss_inputs", "network.row_inputs"):
        monkeypatch.setattr(f"roll.training.{module}.move_to_device", copy_on_cpu)
    losses, weights = train()
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
