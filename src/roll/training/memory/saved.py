"""What a forward pass saves for the backward pass, kept in host memory meanwhile.

    saved tensor ─ its storage ─► host memory, once however many views are saved ─► device, until its last view is read

Weights stay where they are, those that FSDP has gathered too: their storages are known before a module runs. So do
small tensors, and what layers that run again do not save.
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

from roll.training.memory.main_memory import MainMemory

__all__ = ["SavedTensors"]

MIN_BYTES = 2**20
"""Of a storage that is moved."""


@dataclass(kw_only=True, slots=True)
class _Storage:
    """Bytes that are in host memory."""

    away: Tensor
    num_unread: int = 0
    """Views that the backward pass has not read yet."""
    here: Tensor | None = None
    """On the device again, from the first view that is read to the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A saved tensor."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """Of the passes through one network.

    Args:
        network: whose weights stay on the device.
        device: of the network.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._network = network
        self._memory = MainMemory(device)
        self._weights: set[int] = set()
        """Their storages."""
        self._moved: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, _Storage]]
        self._moved = weakref.WeakKeyDictionary()
        """By storage and version of what it holds."""
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(lambda module, _: self._note(module))

    @contextlib.contextmanager
    def kept_away(self) -> Iterator[None]:
        """Move tensors that the body saves for the backward pass to host memory."""
        self._weights.clear()
        self._note(self._network)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._moved.clear()

    def _note(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._weights.add(own.untyped_storage()._cdata)

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor) or tensor.device != self._memory.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_BYTES or storage._cdata in self._weights:
            return tensor
        versions = self._moved.setdefault(storage, {})
        if tensor._version not in versions:
            everything = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            versions[tensor._version] = _Storage(away=self._memory.away(everything))
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
        here = self._memory.back(moved.away) if moved.here is None else moved.here
        moved.num_unread -= 1
        moved.here = here if moved.num_unread > 0 else None
        return here.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
