"""The ranks of a trainer: rendezvous, device meshes, FSDP2 sharding of the network, and reduction of results.

The device mesh has the dimensions pp x dp_replicate x dp_shard x cp x tp, of size 1 where unused. Samples are split
over the data ranks, which are the ranks along the two dp dimensions, not over the whole world. `parallel` first splits
layers into the stages of pp, and shards the weights of a stage over tp. FSDP2 then shards weights over dp_shard and cp
together, because ranks along both have different tokens. Code that uses `Ranks` works in the same way with one rank,
which needs no process group.
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
from roll.models import get_decoder
from roll.training.network.vision_parts import list_tower_blocks
from roll.training.parallel.experts import apply_expert_parallel
from roll.training.parallel.fsdp import fully_shard_module, shard_embeddings
from roll.training.parallel.pipeline import Stage
from roll.training.parallel.tensor import apply_tensor_parallel, replicate
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec

__all__ = [
    "EXPERT_DIMS",
    "MESH_DIMS",
    "MeshSizes",
    "Ranks",
    "choose_num_threads",
    "compute_mesh_sizes",
    "merge_metrics",
    "pick_device",
    "shard",
]

logger = logging.getLogger(__name__)

MESH_DIMS = ("dp_replicate", "shards", "tp")
"""Mesh dimensions of the weights; `shards` are the dimensions `dp_shard` and `cp` together."""

EXPERT_DIMS = ("dp_replicate", "efsdp", "ep")
"""Mesh dimensions of experts that are sharded over `ep`: the ranks of `shards` and `tp`, regrouped."""

T = TypeVar("T")

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def choose_num_threads(ranks_on_node: int) -> int:
    """Return the number of threads for this process: the cores that it may use, divided by the ranks on this
    machine.
    """
    return max(len(os.sched_getaffinity(0)) // ranks_on_node, 1)


def pick_device(spec: TrainerSpec) -> torch.device:
    """Return this rank's device and make it the current device. If ranks see several devices, each rank uses a
    different device, in rank order.

    Raises:
        PlacementError: There are more ranks on this machine than visible devices.
    """
    kind = spec.device
    if kind is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator is not None else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    # If a process sees only its own device, that device has index 0.
    index = spec.rank % spec.node_ranks if visible > 1 else 0
    if index >= visible:
        raise PlacementError(
            f"trainer rank {spec.rank} has no {kind} device: {spec.node_ranks} ranks share this "
            f"machine, which has {visible}: list fewer devices in cluster.device_mapping.actor_train"
        )
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(index)
    return device


def merge_metrics(metrics: dict[str, T], new: Mapping[str, T], combine: Callable[[T, T], T]) -> None:
    """Merge `new` into `metrics`, in place; values with the same name are combined with `combine`."""
    for name, value in new.items():
        metrics[name] = combine(metrics[name], value) if name in metrics else value


class MeshSizes(NamedTuple):
    """The number of ranks along each dimension of the device mesh, in mesh order."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def compute_mesh_sizes(world_size: int, parallel: ParallelConfig) -> MeshSizes:
    """Return the size of every mesh dimension; the product of the sizes is the number of ranks.

    Raises:
        PlacementError: The number of ranks does not fit the parallel sizes.
    """
    if misfit := parallel.find_layout_problem(world_size):
        raise PlacementError(f"{misfit}: change the sizes, or the devices of the trainer in cluster.device_mapping")
    dp_shard = world_size // (parallel.pp * parallel.dp_replicate * parallel.ranks_per_micro_batch)
    return MeshSizes(parallel.pp, parallel.dp_replicate, dp_shard, parallel.cp, parallel.tp)


class Ranks:
    """This rank's coordinates in its trainer's device mesh, and collectives over the ranks of the mesh.

    Every method is collective.
    """

    def __init__(self, spec: TrainerSpec, device: torch.device) -> None:
        self.rank = spec.rank
        self.size = spec.world_size
        self.device = device
        self.data_rank, self.data_size = 0, 1
        """The index of this rank's share of a batch, and the number of shares."""
        self.mesh: DeviceMesh | None = None
        """The mesh of the weights of this rank's stage, if the stage has several ranks."""
        self.stage: Stage | None = None
        """This rank's pipeline stage, if there are several."""
        self.experts_mesh: DeviceMesh | None = None
        """The mesh of the dimensions `EXPERT_DIMS`, if experts are sharded over `ep`."""
        self.share: TokenShard = WHOLE_ROW
        """This rank's share of the tokens of a row."""
        if self.size == 1:
            return
        sizes = compute_mesh_sizes(self.size, spec.training.parallel)
        if not dist.is_initialized():
            if spec.init_method is None:
                raise PlacementError(
                    f"a trainer with {self.size} ranks requires a rendezvous: set init_method in the spec"
                )
            dist.init_process_group(
                # gloo as well: Python objects, and checkpoints copied to host memory, are exchanged between hosts.
                "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_choose_collectives(device)}",
                init_method=spec.init_method,
                rank=spec.rank,
                world_size=spec.world_size,
                timeout=_COLLECTIVE_TIMEOUT,
            )
        if sizes.pp > 1:
            self.stage = self._build_stage(sizes.pp, spec.training.parallel.vpp)
        if self.size == sizes.pp:
            return
        # Three meshes over the same ranks: for samples, weights and experts.
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
        self.share = TokenShard(**groups)

    def _build_stage(self, count: int, num_chunks: int) -> Stage:
        """Create the process groups of all stages and return this rank's stage.

        Stages are the outermost dimension, because stages exchange the least data.
        """
        each = self.size // count
        # A group for each direction; with several chunks, two more for messages between the last and the first stage.
        num = 2 if num_chunks == 1 else 4
        members = (range(i, self.size, each) for i in range(each) for _ in range(num))
        # Every rank must create every group, in the same order, even groups that it does not belong to.
        groups: list[Any] = [dist.new_group(ranks, group_desc="pp") for ranks in members]
        own = self.rank % each
        forward_group, backward_group, *wraparound = groups[num * own : num * (own + 1)]
        return Stage(
            forward_group,
            backward_group,
            self.device,
            includes_rank_0=own == 0,
            wraparound_groups=(wraparound[0], wraparound[1]) if wraparound else None,
            num_chunks=num_chunks,
        )

    @property
    def stream(self) -> int:
        """The index of this rank's random stream; ranks with the same data rank and stage share a stream."""
        return self.data_rank + self.data_size * (self.stage.number if self.stage else 0)

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which writes files and sends weights for all ranks."""
        return self.rank == 0

    @property
    def weights_mesh(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards weights, including the replicas if there are several."""
        assert self.mesh is not None
        return _select_fsdp_mesh(self.mesh, "shards")

    def sum(self, sharded: Tensor, whole: Tensor) -> float:
        """Sum a scalar over all shards of the weights and all pipeline stages.

        Args:
            sharded: This rank's part, from weights that are sharded over `tp`.
            whole: This rank's part, from weights that are replicated over `tp`; it is added once.
        """
        tp = self.share.tp
        # A weight that every tp rank has must count once.
        value = sharded.detach() + whole.detach() * (tp is None or tp.rank() == 0)
        groups = [] if self.mesh is None else [self.mesh.get_group("shards")]
        for group in (*groups, *([] if tp is None else [tp])):
            dist.all_reduce(value, group=group)
        return float(value if self.stage is None else self.stage.sum(value.to(self.device)))

    def reduce(self, values: Mapping[str, float], combine: Callable[[float, float], float]) -> dict[str, float]:
        """Reduce numbers by name over all data ranks with the binary function `combine`; a rank may lack some names."""
        result: dict[str, float] = {}
        for part in self.gather(dict(values)):
            merge_metrics(result, part, combine)
        return result

    def gather(self, value: Any) -> list[Any]:
        """Gather a Python object from every data rank; return the list, in rank order, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.data_size
        dist.all_gather_object(values, value, group=self._data.get_group())
        return values

    def gather_stages(self, value: Any) -> list[Any]:
        """Gather a Python object from every pipeline stage of this data rank; return the list, in stage order, on every
        stage.
        """
        return [value] if self.stage is None else self.stage.gather(value)

    def merge_stages(self, values: Mapping[str, T]) -> dict[str, T]:
        """Merge the dictionaries of all pipeline stages of this data rank; for equal names, later stages take
        precedence.
        """
        return {name: value for part in self.gather_stages(dict(values)) for name, value in part.items()}

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _choose_collectives(device: torch.device) -> str:
    return dist.Backend.default_device_backend_map.get(device.type, "nccl")


def _select_fsdp_mesh(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    """Return the submesh of dimension `shards`; with several replicas, the submesh includes `dp_replicate` (HSDP)."""
    return mesh[("dp_replicate", shards) if mesh["dp_replicate"].size() > 1 else (shards,)]


def shard(network: Any, ranks: Ranks, precision: Precision) -> None:
    """Shard a network in place: matrices over `tp`, then layers, blocks of towers, embeddings and projection with
    FSDP2.

    Weights may be on the meta device and be loaded afterwards. Shards have the master dtype. Weights are gathered in
    the compute dtype, and gradients are reduced in the master dtype. Each rank computes its share of the gradient, so
    FSDP sums gradients instead of averaging them.

    Raises:
        ModelError: The model's decoder has no `layers`, or its sizes cannot be sharded with this layout.
    """
    assert ranks.mesh is not None
    # FSDP2 reduces the gradient of every micro-batch: unreduced sums would take the memory of a whole gradient on every
    # rank.
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.master)
    for parameter in (*network.root.parameters(), *getattr(network, "heads", {}).values()):
        # FSDP shards have the dtype that the parameters have now, and the shards are the master weights.
        parameter.data = parameter.data.to(precision.master)
    network.share = ranks.share
    frozen = getattr(network, "frozen_models", ())  # frozen models stay in the compute dtype
    # Order: experts over ep, matrices over tp, then FSDP, which shards this rank's remaining parts.
    experts = _apply_expert_parallel_to_models(network, frozen, ranks)
    if ranks.share.tp is not None:
        by_matrix = ranks.mesh["tp"]
        apply_tensor_parallel(network.root, network.decoder, network.projection, by_matrix)
        for model in frozen:
            apply_tensor_parallel(model, get_decoder(model), model.get_output_embeddings(), by_matrix)
        if getattr(network, "value_head", None) is not None:
            replicate(network.value_head, by_matrix)
    for decoder in (network.decoder, *(get_decoder(model) for model in frozen)):
        for layer in (layer for layer in _get_layers(decoder) if any(True for _ in layer.parameters())):
            for module in layer.modules():
                if module in experts:
                    _shard_experts(module, ranks.experts_mesh, policy)
            fully_shard_module(layer, ranks.weights_mesh, policy)
    # Inputs of a tower's blocks keep their precision: rotary embeddings of patches are float32.
    tower_policy = replace(policy, cast_forward_inputs=False)
    for block in (block for model in (network.root, *frozen) for block in list_tower_blocks(model)):
        fully_shard_module(block, ranks.weights_mesh, tower_policy)
    shard_embeddings(network.decoder, network.projection, ranks.weights_mesh, policy)
    for model in frozen:
        shard_embeddings(get_decoder(model), model.get_output_embeddings(), ranks.weights_mesh, policy)
    # The root comes last: its bucket has all parameters that no inner bucket has.
    fully_shard_module(network, ranks.weights_mesh, policy)


def _apply_expert_parallel_to_models(network: Any, frozen: Iterable[Any], ranks: Ranks) -> set[nn.Module]:
    """Shard the experts of a network and of its frozen models over `ep`; return the sharded modules."""
    if ranks.experts_mesh is None:
        return set()
    mesh = ranks.experts_mesh["ep"]
    sharded = set(apply_expert_parallel(network.root, mesh).values())
    if not any(ranks.gather_stages(bool(sharded))):
        raise ModelError(
            f"training.parallel.ep must be 1, because {type(network.decoder).__name__} has no experts that can be "
            f"sharded, got {mesh.size()}"
        )
    return sharded.union(*(apply_expert_parallel(model, mesh).values() for model in frozen))


def _shard_experts(module: nn.Module, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy) -> None:
    """Shard a module of experts with FSDP2 by expert, or by the next dimension if the experts do not divide evenly."""
    assert mesh is not None
    size = mesh["efsdp"].size()

    def choose_dim(parameter: nn.Parameter) -> Shard | None:
        count, width = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape[:2]
        return Shard(1) if count % size and width % size == 0 else None

    # No cast of inputs: the router's weights, which are an input of the experts, keep their precision.
    fully_shard_module(module, _select_fsdp_mesh(mesh, "efsdp"), replace(policy, cast_forward_inputs=False), choose_dim)


def _get_layers(decoder: Any) -> Any:
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(decoder).__name__} cannot be sharded: its decoder has no `layers`; train it on one rank"
        )
    return layers
