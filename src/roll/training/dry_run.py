"""Dry run of a training step: one rank on fake tensors, without weights, devices or the other ranks.

    config.json ─ on the meta device ─► network ─ sharded as in a run ─► fake tensors
                ─ one training step ─► peak memory, and every collective

The training code itself runs, with its shapes, dtypes, placements and collectives; a fake process group returns
immediately without transferring data. So a laptop can check a layout for a hundred accelerators: whether the model can
be sharded, and how much memory and communication each rank needs. Only tensors are counted, not kernel workspaces,
collective buffers or fragmentation. Offloaded tensors, and tensors computed only from them, are counted as host memory.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import GroupName, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll.models.loading import build_random_lm
from roll.training.distributed import Ranks, shard
from roll.training.experts import compute_expert_outputs
from roll.training.network.loading import build_network
from roll.training.network.pipeline_split import split_into_stages
from roll.training.network.weights import find_persistent_buffers
from roll.training.parallel.collectives import all_to_all_rows
from roll.training.parallel.experts import _scatter_add
from roll.training.parallel.pipeline import Stage
from roll.training.parallel.tensor import get_local_part
from roll.training.parallel.tokens import TokenShard
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec
from roll.types import LossOutputs, LossRequirements, TrainingBatch

__all__ = ["Collective", "DryRun", "dry_run"]


class Collective(NamedTuple):
    """A collective operation and the group of ranks that runs it; a key of `DryRun.counts` and `DryRun.bytes`."""

    operation: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send`, `recv`, …"""
    ranks: str
    """The group's name: its mesh dimension (`shards`, `tp`, `cp`, …), or `all`."""
    size: int
    """The size of the group."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The memory and communication of one rank in a training step."""

    between_steps: int
    """Bytes allocated between steps: weights and optimizer states."""
    gradients: int
    """Additional bytes allocated after the last micro-batch."""
    peak: int
    """Peak memory in bytes, including all of the above."""
    host: int
    """Peak bytes of offloaded tensors in host memory, which the other fields do not include."""
    counts: Mapping[Collective, int]
    """The number of collectives of each type in a step."""
    bytes: Mapping[Collective, int]
    """The bytes of each type of collective in a step; each collective counts the larger of its input and output."""
    layers: tuple[range, ...]
    """The layers of the rank's stage, by chunk; empty without pipeline stages."""


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """A stand-in loss that depends on every output of the network and allocates no memory."""

    needs: LossRequirements

    def __call__(self, inputs: Any) -> LossOutputs:
        loss = torch.stack([tensor.sum() for tensor in inputs.tensors if tensor.requires_grad]).sum()
        return LossOutputs(loss=loss)


def dry_run(spec: TrainerSpec, batch: TrainingBatch | None, needs: LossRequirements) -> DryRun:
    """Build one rank of a trainer and run a training step, both on fake tensors.

    The process must not be in a process group; the fake group is destroyed at the end.

    Args:
        spec: The spec of the rank. The model needs `config.json` and no weights.
        batch: The samples of all ranks, with arbitrary tokens of the vocabulary; `None` to skip the step.
        needs: The outputs that the loss needs.

    Raises:
        ModelError: The model cannot be sharded with this layout.
        PlacementError: The number of ranks does not fit the layout.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from roll.training.backend import TorchBackend

    if dist.is_initialized():
        raise RuntimeError("a dry run needs a separate process: this process is in a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=spec.rank, world_size=spec.world_size)
    tracker = _MemoryTracker()
    try:
        with _patch_for_dry_run(tracker), tracker:
            backend = TorchBackend(spec)
            held = tracker.live
            tracker.reset()
            if batch is not None:
                backend.train_step(batch, _Loss(needs=needs))
            result = DryRun(
                between_steps=held,
                gradients=tracker.live - held,
                peak=tracker.peak,
                host=tracker.peak_on_host,
                counts=tracker.counts,
                bytes=tracker.bytes,
                layers=() if backend.network.pipeline_split is None else backend.network.pipeline_split.layers,
            )
            del backend
    finally:
        dist.destroy_process_group()
    return result


class _PlaceholderRanks(Ranks):
    """Ranks that return placeholders instead of reducing scalars and Python objects: fake tensors have no data."""

    def __init__(self, spec: TrainerSpec, device: torch.device) -> None:
        with unset_fake_temporarily():  # the constructor computes with real numbers
            super().__init__(spec, device)

    def sum(self, sharded: Tensor, whole: Tensor) -> float:
        return 1.0

    def reduce(self, values: Mapping[str, float], combine: Callable[[float, float], float]) -> dict[str, float]:
        return {"loss": 0.0, **dict.fromkeys(values, 0.0)}

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.data_size

    def gather_stages(self, value: Any) -> list[Any]:
        return [value]


@contextlib.contextmanager
def _patch_for_dry_run(tracker: _MemoryTracker) -> Iterator[None]:
    """Use fake tensors, and patch code that reads tensor data or detects the device, within a `with` block."""
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        tracker.on_resize(storage)
        return result

    instead: dict[str, Any] = {
        "torch.UntypedStorage.resize_": resize_storage,
        "roll.training.memory.host_memory.HostMemory.to_host": lambda _, tensor: tracker.copy(tensor, on_host=True),
        "roll.training.memory.host_memory.HostMemory.to_device": lambda _, tensor: tracker.copy(tensor, on_host=False),
        "roll.training.rank.Ranks": _PlaceholderRanks,
        "roll.training.backend.build_network": _build_meta_network,
        "roll.training.backend.DeferredWeights": _MetaWeights,
        "roll.training.backend.check_split": lambda *args: None,
        "roll.training.backend.check_fp8_support": lambda *args: None,
        "roll.training.backend.split_into_stages": _split_on_meta,
        "roll.training.backend.shard": _shard_on_meta,
        "roll.training.attention.plan.is_varlen_supported": lambda device, dtype: True,
        "roll.training.network.logprobs.load_native_library": lambda: None,
        "roll.training.network.logprobs.has_small_cache": lambda device: False,
        "torch.bincount": lambda x, minlength: x.new_empty(minlength),
        "roll.training.experts._grouped_matmul": _build_grouped_mm_result,
        "roll.training.parallel.experts.build_dispatch_forward": _build_balanced_routing,
        "roll.training.passes.build_loss_inputs": lambda layout, batch, predicted, counts, attention: predicted,
        "roll.training.results.PassResults.read": lambda *args: ({}, {}, {}),
        "roll.training.network.routing.Routing._record_routing": lambda *args: None,
        "roll.training.network.routing.Routing.gather_load": lambda *args: None,
        "roll.training.network.routing.Routing.compute_metrics": lambda *args: {},
    }
    with contextlib.ExitStack() as stack:
        for path, value in instead.items():
            stack.enter_context(mock.patch(path, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


class _MetaWeights:
    """Replaces `DeferredWeights` for a model without weight files."""

    @contextlib.contextmanager
    def materialize_weights(self) -> Iterator[None]:
        yield

    def read_shards(self, network: torch.nn.Module, device: torch.device) -> None:
        _allocate(network, device)


def _build_meta_network(spec: TrainerSpec, dtype: torch.dtype, deferred: _MetaWeights | None = None) -> Any:
    """Build the network of a role on the meta device."""
    bare = mock.patch("roll.training.network.loading.load_causal_lm", _load_on_meta)
    with unset_fake_temporarily(), torch.device("meta"), bare:
        network = build_network(spec, dtype).to("meta")  # adapters are initialized with numbers
    if deferred is None:
        _allocate(network, torch.device("cpu"))
        vars(network)["to"] = lambda device: network  # a fake tensor cannot replace itself
    return network


def _allocate(network: torch.nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory for a network on a device; tied parameters stay tied."""
    places = [(module, name, own) for module in network.modules() for name, own in module._parameters.items()]
    network.to_empty(device=device)
    made: dict[Any, Any] = {}
    for module, name, before in places:
        module._parameters[name] = made.setdefault(before, module._parameters[name])


def _load_on_meta(path: str, dtype: torch.dtype, *, attention: str, trust_remote_code: bool, meta_init: None) -> Any:
    return build_random_lm(Path(path), dtype, attention=attention, trust_remote_code=trust_remote_code)


def _build_grouped_mm_result(x: Tensor, weight: Tensor, counts: Tensor, *, transposed: bool) -> Tensor:
    matrices = weight if transposed else weight.transpose(1, 2)
    return functional.grouped_mm(x.to(weight.dtype), matrices, offs=counts.to(torch.int32))


def _build_balanced_routing(experts: Any, group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return an expert-parallel `forward` with balanced routing: every rank receives the same number of tokens, and
    each token goes to as many ranks as possible.
    """

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        (length, num_chosen), size = chosen.shape, group.size()
        splits = [math.ceil(length * min(size, num_chosen) / size)] * size
        token = torch.arange(sum(splits)) % length
        rows, row_weights, mine = (all_to_all_rows(x[token], splits, splits, group) for x in (states, weights, chosen))
        row = torch.arange(length * num_chosen) % len(rows)
        parameters = {name: get_local_part(getattr(experts, name)) for name in experts._parameters}
        found = compute_expert_outputs(experts, parameters, rows, row, mine[row, 0], row_weights[row, 0])
        sums = _scatter_add(len(rows), [found], [row]).to(states.dtype)
        back = all_to_all_rows(sums, splits, splits, group)
        return _scatter_add(length, back.split(splits), token.split(splits)).to(states.dtype)

    return forward


def _split_on_meta(network: Any, stage: Stage, token_shard: TokenShard, dtype: torch.dtype) -> None:
    names = {*dict(network.root.named_parameters()), *find_persistent_buffers(network.root)}
    tied = {network.projection.weight} & {network.decoder.get_input_embeddings().weight}

    def gather_names(local_names: list[str]) -> list[list[str]]:
        """Return the weight names of every stage, assuming two stages: this stage, and one with all other weights."""
        both = [name for name in local_names if tied and network.root.get_parameter(name) in tied]
        others: list[list[str]] = [[] for _ in range(stage.count)]
        others[0 if stage.number else -1] = [*names.difference(local_names), *both]
        others[stage.number] = local_names
        return others

    with unset_fake_temporarily(), mock.patch.object(stage, "gather", gather_names):
        split_into_stages(network, stage, token_shard, dtype)


def _shard_on_meta(network: Any, ranks: Ranks, precision: Precision) -> None:
    with unset_fake_temporarily():
        shard(network, ranks, precision)


class _MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all live storages, and the number and bytes of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.counts: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()
        self.on_host = 0
        self.peak_on_host = 0
        self._sizes: dict[int, int] = {}
        self._on_host: set[int] = set()
        """The storages in host memory."""
        self._placed: bool | None = None
        """True if new tensors are counted as host memory; with `None`, a new tensor is if all operands are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = self._is_on_host((args, kwargs)) if self._placed is None else self._placed
        result = func(*args, **(kwargs or {}))
        for tensor in _flatten_tensors(result):
            self._track(tensor.untyped_storage(), on_host)
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            self._record_collective(name, (args, kwargs, result))
        return result

    def _is_on_host(self, operands: Any) -> bool:
        """Return whether all tensor operands are in host memory."""
        if not self._on_host:  # the common case; checking all tensors would take a quarter of the time
            return False
        storages = [tensor.untyped_storage()._cdata for tensor in _flatten_tensors(operands)]
        return bool(storages) and self._on_host.issuperset(storages)

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a resized storage. FSDP frees gathered weights by resizing their storage."""
        before = self._sizes.get(storage._cdata)
        if before is not None:
            self._sizes[storage._cdata] = storage.nbytes()
            self._add_live_bytes(storage.nbytes() - before, storage._cdata in self._on_host)

    def copy(self, tensor: Tensor, *, on_host: bool) -> Tensor:
        """Return a copy that is counted as host memory if `on_host` is true, and as device memory otherwise."""
        self._placed = on_host
        try:
            return tensor.clone()
        finally:
            self._placed = None

    def _track(self, storage: torch.UntypedStorage, on_host: bool) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            if on_host:
                self._on_host.add(key)
            self._add_live_bytes(storage.nbytes(), on_host)
            weakref.finalize(storage, self._untrack, key)

    def _untrack(self, key: int) -> None:
        self._add_live_bytes(-self._sizes.pop(key), key in self._on_host)
        self._on_host.discard(key)

    def _add_live_bytes(self, size: int, on_host: bool) -> None:
        if on_host:
            self.on_host += size
            self.peak_on_host = max(self.peak_on_host, self.on_host)
        else:
            self.live += size
            self.peak = max(self.peak, self.live)

    def reset(self) -> None:
        """Reset the device's peak to the currently live bytes, and clear the counts and bytes of collectives."""
        self.peak = self.live
        self.counts.clear()
        self.bytes.clear()

    def _record_collective(self, name: str, arguments: Any) -> None:
        leaves = tree_leaves(arguments)
        group = next(found for leaf in leaves if (found := _find_group(leaf)) is not None)
        sizes = [tensor.numel() * tensor.element_size() for tensor in leaves if isinstance(tensor, Tensor)]
        kind = Collective(_COLLECTIVE_NAMES.get(name, name.strip("_")), _get_group_name(group), group.size())
        self.counts[kind] += 1
        self.bytes[kind] += max(sizes, default=0)


_COLLECTIVE_NAMES = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "recv_any_source_": "recv",
    "recv_": "recv",
}


def _flatten_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that have their own memory: no DTensors and no meta tensors."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.device.type != "meta"]


def _find_group(leaf: Any) -> ProcessGroup | None:
    """Return the process group if a collective's argument is a group or the name of a group, otherwise `None`."""
    if isinstance(leaf, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):
            return ProcessGroup.unbox(leaf)
    if isinstance(leaf, str):
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            return dist.distributed_c10d._resolve_process_group(GroupName(leaf))
    return None


def _get_group_name(group: ProcessGroup) -> str:
    return "all" if group.group_desc == "default_pg" else group.group_desc.removeprefix("mesh_")
