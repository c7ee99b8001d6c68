"""Copies of arrays and results between the host and a rank's device.

CUDA kernels run asynchronously. The host waits for the device when it reads a result, or copies from memory that is not
pinned, and the latency of a copy hardly depends on its size. The inputs of a micro-batch are therefore built on the CPU
and copied together from pinned memory, and the results of all micro-batches are read once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["copy_to_host", "move_to_device", "read_results", "to_tensor", "wait_for_copies"]

T = TypeVar("T")

ALIGNMENT = 64
"""Alignment in bytes of each tensor in the shared buffer, because kernels read several elements at once."""


def to_tensor(values: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Return an array as a CPU tensor, which shares its memory if the dtype is the same.

    Args:
        values: A NumPy array of any shape.
        dtype: The dtype of the result; by default the dtype of the array.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if dtype is None else tensor.to(dtype)


def move_to_device(inputs: T, device: torch.device) -> T:
    """Return a structure of CPU tensors with all tensors on `device`, by one copy that does not wait for the device.

    Tensors may be in dataclasses, tuples, lists and dictionaries, at any depth; other objects are returned unchanged.
    On the device, all tensors share one buffer. On the CPU, the structure itself is returned.
    """
    if device.type == "cpu":
        return inputs
    found: list[Tensor] = []
    _map_tensors(inputs, lambda tensor: found.append(tensor) or tensor)
    moved = iter(_copy_together(found, device))
    return _map_tensors(inputs, lambda tensor: next(moved))


def _map_tensors(value: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """Return a structure with `transform` applied to its tensors, always in the same order."""
    if isinstance(value, Tensor):
        return transform(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{own.name: _map_tensors(getattr(value, own.name), transform) for own in fields(value)})
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, transform) for item in value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, transform) for key, item in value.items()}
    return value


def _copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors to a device through one pinned buffer; the results are views of one buffer on the device."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
    places = [slice(start, start + size) for start, size in zip([0, *ends], sizes, strict=False)]

    def get_parts(buffer: Tensor) -> list[Tensor]:
        return [buffer[own].view(like.dtype).view(like.shape) for own, like in zip(places, tensors, strict=True)]

    pinned = _allocate_pinned(ends[-1] if ends else 0)
    for part, tensor in zip(get_parts(pinned), tensors, strict=True):
        part.copy_(tensor)
    return get_parts(pinned.to(device, non_blocking=True))


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory without waiting for its device; call `wait_for_copies` before reading it."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait until all copies from a device have arrived."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def read_results(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return floating-point tensors of any shape as NumPy arrays, with one synchronization per device.

    Results in half precision are returned in float32, because NumPy has no bfloat16.
    """
    arrays: list[Any] = [None] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    for device, members in by_device.items():
        own = [tensors[i].detach() for i in members]
        # Concatenated, so that one copy is enough. Promotion to a wider dtype and back is exact.
        wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in own) else torch.float32
        flat = [own[0].to(wide).flatten()] if len(own) == 1 else [torch.cat([part.to(wide).flatten() for part in own])]
        values = _read(flat[0]) if device.type != "cpu" else flat[0].numpy()
        start = 0
        for i, part in zip(members, own, strict=True):
            narrow = np.float64 if part.dtype == torch.float64 else np.float32
            arrays[i] = values[start : start + part.numel()].reshape(part.shape).astype(narrow, copy=False)
            start += part.numel()
    return arrays


def _allocate_pinned(size: int) -> Tensor:
    """Allocate bytes of pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _read(tensor: Tensor) -> NDArray[Any]:
    """Wait for the device and copy a tensor to the host."""
    return tensor.cpu().numpy()
