"""What two ranks load of every family for `test_pieces.py`."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families import FAMILIES
from torch.distributed.tensor import DTensor
from training_helpers import make_spec

from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend

WAYS: dict[str, dict[str, int]] = {"dp": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}
ROLES: dict[str, dict[str, Any]] = {
    "policy": {"holds_reference": True, "value_head_learning_rate": 1e-3},
    "critic": {"role": "critic"},
    "reward_model": {"role": "reward_model"},
    "reference": {"role": "reference"},
}

_meetings = itertools.count()
"""Ranks meet anew for every layout, at a place of its own."""


def loaded(model: Path, parallel: dict[str, int], dtype: str, **spec: Any) -> dict[str, torch.Tensor] | str:
    """All parameters and buffers of a network, whole; of a stage those that it has. Or why it is refused."""
    lora = LoRAConfig(rank=2) if spec.pop("adapted", False) else None
    plain = make_spec(model, dtype=dtype, lora=lora, parallel=ParallelConfig(**parallel))
    try:
        network = TorchBackend(dataclasses.replace(plain, **spec)).network
        tensors = dict(network.named_parameters()) | dict(network.named_buffers())
        return {
            name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().to(torch.float64)
            for name, x in tensors.items()
        }
    except ModelError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # with its groups, each of which has threads that never sleep


def differences(model: Path, ways: dict[str, dict[str, int]], ranks: dict[str, Any], **spec: Any) -> list[str]:
    """Which weights are not those that one rank loads."""
    wrong = []
    for dtype in ("float32", "bfloat16"):
        expected = loaded(model, {}, dtype, **spec)
        assert not isinstance(expected, str), expected
        for way, parallel in ways.items():
            meeting = f"{ranks['init_method']}-{next(_meetings)}"
            found = loaded(model, parallel, dtype, **spec, **(ranks | {"init_method": meeting}))
            if isinstance(found, str):
                continue  # families that cannot be divided are named elsewhere
            names = found if way == "pp" else expected
            wrong += [f"{dtype} {way} {x}" for x in names if not torch.equal(found[x], expected[x].to(found[x].dtype))]
    return wrong


def run_rank(rank: int, directory: Path) -> None:
    """Every family in every way, and every role of one of them, as one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    found = {name: differences(directory / name, WAYS, ranks, holds_reference=True) for name in FAMILIES}
    for role, spec in ROLES.items():
        for adapted in (False, True):
            found[f"{role} {adapted}"] = differences(directory / "qwen3-moe", WAYS, ranks, adapted=adapted, **spec)
    torch.save(found, directory / f"found-{rank}.pt")
