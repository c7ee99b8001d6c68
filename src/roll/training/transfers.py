"""Copies of arrays and results between the host and a rank's device.

A CUDA device runs behind the host. The host must wait for it whenever it reads a result, and whenever it copies from
memory that is not pinned. Inputs are therefore copied from pinned memory, and the results of all micro-batches are read
once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["read_results", "to_device"]


def to_device(values: NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array as a tensor on `device`, without waiting for the device.

    On the CPU, the tensor shares the array's memory if the dtype is the same.

    Args:
        values: A NumPy array or a CPU tensor, of any shape.
        device: The device of the result.
        dtype: The dtype of the result; by default the dtype of the array.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor if device.type == "cpu" else _pin(tensor).to(device, non_blocking=True)


def read_results(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return floating-point tensors of any shape as NumPy arrays, with one wait for each device that has some.

    Results in half precision are returned in float32, because NumPy has no bfloat16.
    """
    arrays: list[Any] = [None] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    for device, members in by_device.items():
        own = [tensors[i].detach() for i in members]
        # One tensor means one copy. Promotion to a wider dtype is exact, and so is the way back.
        wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in own) else torch.float32
        flat = [own[0].to(wide).flatten()] if len(own) == 1 else [torch.cat([part.to(wide).flatten() for part in own])]
        values = _read(flat[0]) if device.type != "cpu" else flat[0].numpy()
        start = 0
        for i, part in zip(members, own, strict=True):
            narrow = np.float64 if part.dtype == torch.float64 else np.float32
            arrays[i] = values[start : start + part.numel()].reshape(part.shape).astype(narrow, copy=False)
            start += part.numel()
    return arrays


def _pin(tensor: Tensor) -> Tensor:
    """Copy a CPU tensor to pinned memory."""
    return tensor.pin_memory()


def _read(tensor: Tensor) -> NDArray[Any]:
    """Wait for the device and copy a tensor to the host."""
    return tensor.cpu().numpy()
