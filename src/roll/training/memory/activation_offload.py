"""Activation offload: tensors saved for the backward pass are stored in host memory until it runs.

    saved tensor ─ its storage ─► host memory, once for all saved views ─► device, until its last view is read

Weights stay on the device, including those gathered by FSDP: their storages are recorded before a module runs. Small
tensors stay there as well. Activations that checkpointed layers recompute are not saved at all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from roll.training.memory.host_memory import HostMemory

__all__ = ["ActivationOffloader"]

MIN_OFFLOAD_BYTES = 2**20
"""Minimum size of a storage that is offloaded, in bytes."""


@dataclass(kw_only=True, slots=True)
class _Storage:
    """The host copy of a storage, shared by all saved tensors that are views of this storage."""

    on_host: Tensor
    num_unread: int = 0
    """The number of views that the backward pass has not read yet."""
    on_device: Tensor | None = None
    """The copy on the device, while the backward pass has read some views and not others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A saved tensor, represented as a view of an offloaded storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffloader:
    """Offloads the activations that one network saves for its backward passes.

    Args:
        network: The network, whose weights stay on the device.
        device: The device of the network.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._network = network
        self._memory = HostMemory(device)
        self._weights: set[int] = set()
        """The storages of the weights."""
        self._moved: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, _Storage]]
        self._moved = weakref.WeakKeyDictionary()
        """The moved storages, by storage and version of its content."""
        for module in network.modules():
            if isinstance(module, FSDPModule):
                # FSDP gathers weights in a hook of its own, which runs first; gathered weights have storages of their
                # own.
                module.register_forward_pre_hook(lambda module, _: self._record_weights(module))

    @contextlib.contextmanager
    def offload_saved_tensors(self) -> Iterator[None]:
        """Offload the tensors that are saved for the backward pass within a `with` block to host memory, except weights
        and small tensors.
        """
        self._weights.clear()
        self._record_weights(self._network)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._moved.clear()

    def _record_weights(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._weights.add(own.untyped_storage()._cdata)

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor) or tensor.device != self._memory.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_OFFLOAD_BYTES or storage._cdata in self._weights:
            return tensor
        versions = self._moved.setdefault(storage, {})
        # In-place operations change a storage after it was saved; each version is copied once for all of its views.
        if tensor._version not in versions:
            everything = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            versions[tensor._version] = _Storage(on_host=self._memory.to_host(everything))
        moved = versions[tensor._version]
        moved.num_unread += 1
        return _View(
            storage=moved,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    @torch.no_grad()
    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        moved = saved.storage
        here = self._memory.to_device(moved.on_host) if moved.on_device is None else moved.on_device
        moved.num_unread -= 1
        moved.on_device = here if moved.num_unread > 0 else None
        return here.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
