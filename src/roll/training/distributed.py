"""The ranks of a trainer: meeting, sharding the network over them, and adding up what they found.

All ranks form one `DeviceMesh` with named dimensions, of size 1 where unused. Work is divided by data rank and data
size, those of the dimensions along which ranks see different samples (`DATA_DIMS`), never by the world's. Today all
ranks lie along `dp_shard`. Code that asks `Ranks` works the same with one rank, which needs no process group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from roll.errors import ModelError, PlacementError
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec

__all__ = ["MESH_DIMS", "Ranks", "combine", "default_num_threads", "mesh_sizes", "pick_device", "reshard", "shard"]

logger = logging.getLogger(__name__)

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

DATA_DIMS = ("dp_replicate", "dp_shard")

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)


def default_num_threads(ranks_on_node: int) -> int:
    """Cores this process may use, shared between the ranks of the machine."""
    return max(len(os.sched_getaffinity(0)) // ranks_on_node, 1)


def pick_device(spec: TrainerSpec) -> torch.device:
    """The device of a rank; ranks that see several devices take one each, in order.

    Raises:
        PlacementError: more ranks on this machine than devices that they can see.
    """
    kind = spec.device
    if kind is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator is not None else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    index = spec.rank % spec.node_ranks if visible > 1 else 0
    if index >= visible:
        raise PlacementError(
            f"trainer rank {spec.rank} finds no {kind} device for itself: {spec.node_ranks} ranks share this "
            f"machine, which shows {visible}. Shorten cluster.device_mapping.actor_train."
        )
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(index)
    return device


def combine(found: dict[str, T], new: Mapping[str, T], both: Callable[[T, T], T]) -> None:
    """Take `new` into `found`, in place; `both` makes one of two values of a name."""
    for name, value in new.items():
        found[name] = both(found[name], value) if name in found else value


def mesh_sizes(world_size: int) -> tuple[int, ...]:
    """The size of every mesh dimension; their product is the number of ranks."""
    return tuple(world_size if name == "dp_shard" else 1 for name in MESH_DIMS)


class Ranks:
    """This rank among all ranks of its trainer. Every method is collective."""

    def __init__(self, spec: TrainerSpec, device: torch.device) -> None:
        self.rank = spec.rank
        self.size = spec.world_size
        self.device = device
        self.data_rank, self.data_size = 0, 1
        """Which share of a batch is this rank's, and how many shares there are."""
        self.mesh: DeviceMesh | None = None
        if self.size == 1:
            return
        if not dist.is_initialized():
            if spec.init_method is None:
                raise PlacementError(f"a trainer of {self.size} ranks needs an init_method where its ranks can meet")
            dist.init_process_group(
                "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_collectives(device)}",
                init_method=spec.init_method,
                rank=spec.rank,
                world_size=spec.world_size,
                timeout=_TIMEOUT,
            )
        self.mesh = init_device_mesh(device.type, mesh_sizes(self.size), mesh_dim_names=MESH_DIMS)
        self._data = self.mesh[DATA_DIMS]._flatten("data")
        self.data_rank, self.data_size = self._data.get_local_rank(), self._data.size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def sum(self, value: Tensor) -> float:
        """Sum of a scalar over the ranks that hold different shards of the weights."""
        if self.mesh is not None:
            value = value.detach().clone()
            dist.all_reduce(value, group=self.mesh.get_group("dp_shard"))
        return float(value)

    def reduce(self, values: Mapping[str, Tensor], both: Callable[[float, float], float]) -> dict[str, float]:
        """Scalars by name over all shares of the batch, combined by `both`. A rank without work may lack names."""
        result: dict[str, float] = {}
        for part in self.gather({name: float(value) for name, value in values.items()}):
            combine(result, part, both)
        return result

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every share of the batch, by data rank, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.data_size
        dist.all_gather_object(values, value, group=self._data.get_group())
        return values

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _collectives(device: torch.device) -> str:
    return dist.Backend.default_device_backend_map.get(device.type, "nccl")


def shard(network: Any, ranks: Ranks, precision: Precision) -> None:
    """Spread a network's weights over `dp_shard` with FSDP2, in place: layer by layer, then the rest.

    Every rank holds the whole model on its way here. The shards are in the master dtype; weights are gathered
    in the compute dtype, gradients are reduced in the master dtype. FSDP averages gradients over ranks; its
    divide factor fails on gloo, so the trainer multiplies the loss by the data size instead.

    Raises:
        ModelError: the model does not keep its decoder layers where they are expected.
    """
    assert ranks.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.master)
    mesh = ranks.mesh["dp_shard"]
    for parameter in (*network.root.parameters(), *getattr(network, "heads", {}).values()):
        parameter.data = parameter.data.to(precision.master)
    frozen = [model.get_decoder() for model in getattr(network, "frozen", ())]  # they stay in the compute dtype
    for decoder in (network.decoder, *frozen):
        for layer in _layers(decoder):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def _layers(decoder: Any) -> Any:
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(decoder).__name__} cannot be sharded: its decoder has no `layers`; train it on one rank"
        )
    return layers


def reshard(network: nn.Module) -> None:
    """Let go of the gathered weights that FSDP keeps after a forward pass that no backward pass follows.

    Otherwise the next forward pass would use them even if the shards have changed meanwhile.
    """
    if isinstance(network, FSDPModule):
        network.reshard()
