"""The ranks of a trainer: rendezvous, sharding of the network, and reduction of results.

Ranks have a coordinate along each of the dimensions pp x dp_replicate x dp_shard x cp x tp, of size 1 where unused.
Samples are divided by data rank and data size, those of the two dp dimensions, never by the world's. `parallel` first
cuts layers into the stages of pp, and divides the weights of a stage over tp. FSDP2 then shards weights over dp_shard
and cp together, because both have different tokens. Code that uses `Ranks` works the same with one rank, which needs no
process group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from roll.config.parallel import ParallelConfig
from roll.errors import ModelError, PlacementError
from roll.models import decoder_of
from roll.training.parallel.experts import divide_experts
from roll.training.parallel.fsdp import fully_shard_module, shard_embeddings
from roll.training.parallel.pipeline import Stage
from roll.training.parallel.tensor import divide, replicate
from roll.training.parallel.tokens import WHOLE, TokenShare
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec

__all__ = [
    "EXPERT_DIMS",
    "MESH_DIMS",
    "MeshSizes",
    "Ranks",
    "default_num_threads",
    "merge_metrics",
    "mesh_sizes",
    "pick_device",
    "shard",
]

logger = logging.getLogger(__name__)

MESH_DIMS = ("dp_replicate", "shards", "tp")
"""Mesh dimensions of the weights; `shards` are the dimensions `dp_shard` and `cp` together."""

EXPERT_DIMS = ("dp_replicate", "efsdp", "ep")
"""Mesh dimensions of experts, where `ep` divides them: the ranks of `shards` and `tp`, regrouped."""

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)


def default_num_threads(ranks_on_node: int) -> int:
    """Return the number of cores for this process: those it may use, divided by the ranks of the machine."""
    return max(len(os.sched_getaffinity(0)) // ranks_on_node, 1)


def pick_device(spec: TrainerSpec) -> torch.device:
    """Return the device of a rank; ranks that see several devices take one each, in order.

    Raises:
        PlacementError: there are more ranks on this machine than visible devices.
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
            f"trainer rank {spec.rank} has no {kind} device: {spec.node_ranks} ranks share this "
            f"machine, which has {visible}. Shorten cluster.device_mapping.actor_train."
        )
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(index)
    return device


def merge_metrics(found: dict[str, T], new: Mapping[str, T], both: Callable[[T, T], T]) -> None:
    """Merge `new` into `found`, in place; `both` combines two values of one name."""
    for name, value in new.items():
        found[name] = both(found[name], value) if name in found else value


class MeshSizes(NamedTuple):
    """The number of ranks along each dimension, in the order of dimensions."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def mesh_sizes(world_size: int, parallel: ParallelConfig) -> MeshSizes:
    """Return the size of every dimension; their product is the number of ranks.

    Raises:
        PlacementError: the number of ranks cannot be divided this way.
    """
    if misfit := parallel.invalid_layout_reason(world_size):
        raise PlacementError(f"{misfit}: change them, or the devices that cluster.device_mapping gives to the trainer")
    dp_shard = world_size // (parallel.pp * parallel.dp_replicate * parallel.ranks_per_micro_batch)
    return MeshSizes(parallel.pp, parallel.dp_replicate, dp_shard, parallel.cp, parallel.tp)


class Ranks:
    """This rank among all ranks of its trainer. Every method is collective."""

    def __init__(self, spec: TrainerSpec, device: torch.device) -> None:
        self.rank = spec.rank
        self.size = spec.world_size
        self.device = device
        self.data_rank, self.data_size = 0, 1
        """The index of this rank's share of a batch, and the number of shares."""
        self.mesh: DeviceMesh | None = None
        """The mesh of the weights of this rank's stage, if several ranks have it."""
        self.stage: Stage | None = None
        """This rank's pipeline stage, if there are several."""
        self.experts_mesh: DeviceMesh | None = None
        """The mesh of the dimensions `EXPERT_DIMS`, if experts are divided."""
        self.share: TokenShare = WHOLE
        """This rank's share of the tokens of a row."""
        if self.size == 1:
            return
        sizes = mesh_sizes(self.size, spec.training.parallel)
        if not dist.is_initialized():
            if spec.init_method is None:
                raise PlacementError(
                    f"a trainer of {self.size} ranks needs an init_method for the rendezvous of its ranks"
                )
            dist.init_process_group(
                "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_collectives(device)}",
                init_method=spec.init_method,
                rank=spec.rank,
                world_size=spec.world_size,
                timeout=_TIMEOUT,
            )
        if sizes.pp > 1:
            self.stage = self._build_stage(sizes.pp, spec.training.parallel.vpp)
        if self.size == sizes.pp:
            return
        by_samples = init_device_mesh(device.type, sizes, mesh_dim_names=MeshSizes._fields)
        self._data = by_samples["dp_replicate", "dp_shard"]._flatten("data")
        self.data_rank, self.data_size = self._data.get_local_rank(), self._data.size()
        by_weights = (sizes.pp, sizes.dp_replicate, sizes.dp_shard * sizes.cp, sizes.tp)
        self.mesh = init_device_mesh(device.type, by_weights, mesh_dim_names=("pp", *MESH_DIMS))[MESH_DIMS]
        if (ep := spec.training.parallel.ep) > 1:
            by_experts = (sizes.pp, sizes.dp_replicate, sizes.dp_shard * sizes.cp * sizes.tp // ep, ep)
            dims = ("pp", *EXPERT_DIMS)
            self.experts_mesh = init_device_mesh(device.type, by_experts, mesh_dim_names=dims)[EXPERT_DIMS]
        groups = {name: by_samples.get_group(name) for name, size in (("tp", sizes.tp), ("cp", sizes.cp)) if size > 1}
        self.share = TokenShare(**groups)

    def _build_stage(self, count: int, num_chunks: int) -> Stage:
        """Create the process groups of all stages and return this rank's stage.

        Stages are the outermost dimension, because the least data passes between them.
        """
        each = self.size // count
        num = 2 if num_chunks == 1 else 4
        members = (range(i, self.size, each) for i in range(each) for _ in range(num))
        groups: list[Any] = [dist.new_group(ranks, group_desc="pp") for ranks in members]
        own = self.rank % each
        up, down, *around = groups[num * own : num * (own + 1)]
        return Stage(
            up,
            down,
            self.device,
            with_first=own == 0,
            around=(around[0], around[1]) if around else None,
            num_chunks=num_chunks,
        )

    @property
    def stream(self) -> int:
        """The index of this rank's random stream: ranks of one share and one stage draw the same numbers."""
        return self.data_rank + self.data_size * (self.stage.number if self.stage else 0)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and sends for all."""
        return self.rank == 0

    @property
    def weights_mesh(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards weights, including the replicas if there are several."""
        assert self.mesh is not None
        return _use_memcpy_gather(self.mesh, "shards")

    def sum(self, sharded: Tensor, whole: Tensor) -> float:
        """Sum a scalar over the ranks that hold different parts of the weights, of all stages.

        Args:
            sharded: The part from weights that the `tp` ranks have divided.
            whole: The part from weights that every `tp` rank has; counted once.
        """
        tp = self.share.tp
        value = sharded.detach() + whole.detach() * (tp is None or tp.rank() == 0)
        groups = [] if self.mesh is None else [self.mesh.get_group("shards")]
        for group in (*groups, *([] if tp is None else [tp])):
            dist.all_reduce(value, group=group)
        return float(value if self.stage is None else self.stage.sum(value.to(self.device)))

    def reduce(self, values: Mapping[str, Tensor], both: Callable[[float, float], float]) -> dict[str, float]:
        """Reduce scalars by name over all shares of the batch with `both`. A rank without work may lack names."""
        result: dict[str, float] = {}
        for part in self.gather({name: float(value) for name, value in values.items()}):
            merge_metrics(result, part, both)
        return result

    def gather(self, value: Any) -> list[Any]:
        """Gather the plain value of every share of the batch, by data rank, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.data_size
        dist.all_gather_object(values, value, group=self._data.get_group())
        return values

    def gather_stages(self, value: Any) -> list[Any]:
        """Gather the plain value of every stage of this rank's share, on each of these stages."""
        return [value] if self.stage is None else self.stage.gather(value)

    def merge_stages(self, values: Mapping[str, T]) -> dict[str, T]:
        """Merge the values of all stages by name."""
        return {name: value for part in self.gather_stages(dict(values)) for name, value in part.items()}

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _collectives(device: torch.device) -> str:
    return dist.Backend.default_device_backend_map.get(device.type, "nccl")


def _use_memcpy_gather(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards weights: `shards`, and the replicas if there are several."""
    return mesh[("dp_replicate", shards) if mesh["dp_replicate"].size() > 1 else (shards,)]


def shard(network: Any, ranks: Ranks, precision: Precision) -> None:
    """Shard a network over the ranks, in place: over `tp` by matrix, with FSDP2 by layer, embeddings and projection
    apart.

    Weights may be on the meta device, to be read afterwards. Shards have the master dtype; weights are gathered in the
    compute dtype, gradients are reduced in the master dtype. Each rank's gradient is its share, so FSDP sums gradients
    instead of averaging them.

    Raises:
        ModelError: the model's decoder layers are not at the expected place, or cannot be divided this way.
    """
    assert ranks.mesh is not None
    # FSDP2 reduces the gradient of every micro-batch: unreduced sums would take the memory of a whole gradient on every
    # rank.
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.master)
    for parameter in (*network.root.parameters(), *getattr(network, "heads", {}).values()):
        parameter.data = parameter.data.to(precision.master)
    network.share = ranks.share
    frozen = getattr(network, "frozen_models", ())  # frozen models stay in the compute dtype
    experts = _divide_all_experts(network, frozen, ranks)
    if ranks.share.tp is not None:
        by_matrix = ranks.mesh["tp"]
        divide(network.root, network.decoder, network.projection, by_matrix)
        for model in frozen:
            divide(model, decoder_of(model), model.get_output_embeddings(), by_matrix)
        if getattr(network, "value_head", None) is not None:
            replicate(network.value_head, by_matrix)
    for decoder in (network.decoder, *(decoder_of(model) for model in frozen)):
        for layer in (layer for layer in _layers(decoder) if any(True for _ in layer.parameters())):
            for module in layer.modules():
                if module in experts:
                    _shard_experts(module, ranks.experts_mesh, policy)
            fully_shard_module(layer, ranks.weights_mesh, policy)
    shard_embeddings(network.decoder, network.projection, ranks.weights_mesh, policy)
    for model in frozen:
        shard_embeddings(decoder_of(model), model.get_output_embeddings(), ranks.weights_mesh, policy)
    fully_shard_module(network, ranks.weights_mesh, policy)


def _divide_all_experts(network: Any, frozen: Iterable[Any], ranks: Ranks) -> set[nn.Module]:
    """Divide the experts of a network and of its frozen models over `ep`, and return all of these modules."""
    if ranks.experts_mesh is None:
        return set()
    mesh = ranks.experts_mesh["ep"]
    own = set(divide_experts(network.root, mesh).values())
    if not any(ranks.gather_stages(bool(own))):
        raise ModelError(
            f"training.parallel.ep is {mesh.size()}, but {type(network.decoder).__name__} has no experts that "
            "can be divided: set ep to 1"
        )
    return own.union(*(divide_experts(model, mesh).values() for model in frozen))


def _shard_experts(module: nn.Module, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy) -> None:
    """Shard a module of experts by expert, or by the next dimension if only that one divides evenly.

    Router weights keep their precision.
    """
    assert mesh is not None
    size = mesh["efsdp"].size()

    def dim(parameter: nn.Parameter) -> Shard | None:
        count, width = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape[:2]
        return Shard(1) if count % size and width % size == 0 else None

    fully_shard_module(module, _use_memcpy_gather(mesh, "efsdp"), replace(policy, cast_forward_inputs=False), dim)


def _layers(decoder: Any) -> Any:
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(decoder).__name__} cannot be sharded: its decoder has no `layers`; train it on one rank"
        )
    return layers
