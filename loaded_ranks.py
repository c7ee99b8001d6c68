"""What ranks of every layout do in their processes for `test_loaded_weights.py`; each writes down what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_helpers import make_spec

from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.models import load_causal_lm, load_scorer
from roll.training import TorchBackend

WAYS: dict[str, dict[str, int]] = {"dp": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}
UNEVEN: dict[str, dict[str, int]] = {"dp 3, tp 2": {"tp": 2}, "dp 3, replicas 2": {"dp_replicate": 2}, "dp 6": {}}
"""Of six ranks: hardly a weight divides by three, and FSDP divides once more what tp has divided."""
ROLES: dict[str, dict[str, Any]] = {
    "with a reference": {"holds_reference": True},
    "with a teacher": {"teachers": True},
    "with a value head": {"value_head_learning_rate": 1e-3},
    "with adapters": {"lora": LoRAConfig(rank=2)},
    "critic": {"role": "critic"},
    "reference": {"role": "reference"},
    "reward model": {"role": "reward_model"},
    "reward model with adapters": {"role": "reward_model", "lora": LoRAConfig(rank=2)},
}


def differences(model: Path, parallel: Mapping[str, int], dtype: str, ranks: Mapping[str, Any], **role: Any) -> Any:
    """Names of what this rank has otherwise than the files; why the model is refused; and what it exports."""
    export_to = role.pop("export_to", None)
    if role.pop("teachers", False):
        role["teachers"] = (str(model),)
    lora = role.pop("lora", None)
    spec = dataclasses.replace(make_spec(model, dtype=dtype, lora=lora, parallel=ParallelConfig(**parallel)), **role)
    try:
        backend = TorchBackend(dataclasses.replace(spec, **ranks))
    except ModelError as error:
        return str(error)
    alone = TorchBackend(spec_of_one(spec)).network
    wrong = _apart(backend.network, alone, only_own=parallel.get("pp", 1) > 1)
    if spec.role == "policy" and lora is None:
        wrong += _apart(backend.network.root, load_causal_lm(model, dtype), only_own=True)
    elif spec.role == "reward_model" and lora is None:
        wrong += _apart(backend.network, load_scorer(model, dtype), only_own=True)
    if export_to is not None:
        backend.export(export_to)
    return wrong


def spec_of_one(spec: Any) -> Any:
    """The same trainer of one rank, which takes no part in the group."""
    training = spec.training.model_copy(update={"parallel": ParallelConfig()})
    return dataclasses.replace(spec, training=training, rank=0, world_size=1, init_method=None)


def _apart(network: torch.nn.Module, alone: torch.nn.Module, *, only_own: bool) -> list[str]:
    """Names of parameters and buffers which are not bit for bit the same, or which only one has."""
    mine, wanted = ({**dict(n.named_parameters()), **dict(n.named_buffers())} for n in (network, alone))
    wrong = [] if only_own else sorted(set(mine) ^ set(wanted))
    for name in mine.keys() & wanted.keys():
        found = _whole(mine[name])
        if not _same(found, wanted[name].to(found.dtype)):
            wrong.append(name)
    trained = [{name for name, p in n.named_parameters() if p.requires_grad} & mine.keys() for n in (network, alone)]
    return wrong + sorted(trained[0] ^ (trained[1] & set(wanted)) if not only_own else ())


def _whole(tensor: Tensor) -> Tensor:
    assert not tensor.is_meta, "a weight was never read"
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal as bits: zeros of another sign are others."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def run_rank(rank: int, world_size: int, directory: Path, names: Sequence[str], ways: Mapping[str, Any]) -> None:
    """Every family in every way, and the first one in every role."""
    ranks = {"rank": rank, "world_size": world_size, "init_method": f"file://{directory / f'meeting-{world_size}'}"}
    found = {}
    for name in names:
        for way, parallel in ways.items():
            for dtype in ("float32", "bfloat16"):
                exports = directory / "exports" / f"{name}, {way}, {dtype}"
                found[name, way, dtype] = differences(directory / name, parallel, dtype, ranks, export_to=exports)
    for role, settings in ROLES.items():
        for way, parallel in ways.items():
            found[role, way, "float32"] = differences(directory / names[0], parallel, "float32", ranks, **settings)
    torch.save(found, directory / f"found-{world_size}-{rank}.pt")
    torch.distributed.destroy_process_group()
