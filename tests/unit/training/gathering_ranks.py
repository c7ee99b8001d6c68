"""What three ranks do in their processes for `test_gathering.py`; rank 0 writes down what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.training import TorchBackend
from roll.training.dry_run import _MemoryTracker
from roll.training.parallel.collectives import all_gather_into, gather_on_first_rank, reduce_scatter_into
from roll.training.precision import Precision

RANKS = 3
FLOATS = Precision(compute=torch.float32, master=torch.float32)


def part_of(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * rank


def share_of(rank: int) -> Tensor:
    return torch.arange(18.0).view(6, 3) * (rank + 1)


def collected(rank: int) -> dict[str, Any]:
    """Of each collective, what it left here."""
    group = dist.group.WORLD
    assert group is not None
    whole = torch.full((2 * RANKS, 3), -1.0)
    all_gather_into(whole, part_of(rank), group)
    in_place = torch.full((2 * RANKS, 3), -1.0)
    own = in_place[2 * rank : 2 * rank + 2].copy_(part_of(rank))
    all_gather_into(in_place, own, group)
    total = torch.empty(2, 3)
    share = share_of(rank)
    reduce_scatter_into(total, share, group)
    assert torch.equal(share, share_of(rank))
    again = torch.empty(2, 3)
    reduce_scatter_into(again, share, group, overwrite=True)
    assert torch.equal(again, total)
    rows = torch.arange(8.0).view(4, 2)
    parts = [*rows.chunk(RANKS), *[rows.new_empty(0, 2)] * RANKS]
    return {
        "gathered": whole,
        "in place": in_place,
        "total": total,
        "by first": gather_on_first_rank(parts[rank], 4, group),
    }


def held(model: Path, **ranks: Any) -> dict[str, int]:
    """Bytes of tensors that a rank holds: between steps, after one, at its peak."""
    spec, watch, resize = dataclasses.replace(make_spec(model), **ranks), _MemoryTracker(), torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        watch.on_resize(storage)
        return result

    with mock.patch("torch.UntypedStorage.resize_", resized), watch:
        backend = TorchBackend(spec, precision=FLOATS)
        between = watch.live
        watch.reset()
        backend.train_step(make_batch(0, groups=3, group_size=1, prompt=(3, 4), response=(3, 4)), PolicyLoss())
        found = {"between": between, "after": watch.live, "peak": watch.peak}
        watch.reset()
        for _, tensor in backend.weights():
            del tensor
        return found | {"sync": watch.peak - found["after"]}


def run_rank(rank: int, directory: Path, model: Path) -> None:
    """Everything, one after the other."""
    ranks = {"rank": rank, "world_size": RANKS, "init_method": f"file://{directory / 'meeting'}"}
    found: dict[str, Any] = {"held": held(model, **ranks)}
    found |= collected(rank)
    torch.save(found, directory / f"found-{rank}.pt")
    dist.destroy_process_group()
