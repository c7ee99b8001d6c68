"""The plan of a sync: its tensors, their order, their buckets. Pure functions.

Names are those of the HF checkpoint, as the `WeightSource` yields them: tied weights once, LoRA merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roll.errors import WeightSyncError
from roll.types import TensorSpec

__all__ = ["ALIGNMENT", "Bucket", "Slot", "dtype_of", "num_bytes", "plan_buckets", "spec_of", "total_bytes"]

ALIGNMENT = 64
"""The offset of every tensor is a multiple of this, in bytes: a cache line, and more than any dtype needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of a tensor in its bucket."""

    spec: TensorSpec
    offset: int
    """The offset in the bucket in bytes, a multiple of `ALIGNMENT`."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Whole tensors that are sent together."""

    slots: tuple[Slot, ...]
    num_bytes: int
    """The size with the gaps between tensors, a multiple of `ALIGNMENT`."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype that a manifest names.

    Raises:
        WeightSyncError: torch has no such dtype.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(
            f"tensor '{spec.name}' has dtype '{spec.dtype}', which this version of torch does not support."
        )
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    """Return the size of a tensor's elements in bytes."""
    return spec.num_elements * dtype_of(spec).itemsize


def total_bytes(manifest: Sequence[TensorSpec]) -> int:
    """Return the size of all tensors' elements in bytes."""
    return sum(num_bytes(spec) for spec in manifest)


def plan_buckets(manifest: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets in manifest order.

    A tensor is never split; one larger than `bucket_bytes` gets a bucket of its own.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for spec in manifest:
        length = num_bytes(spec)
        if slots and end + length > bucket_bytes:
            buckets.append(Bucket(slots=tuple(slots), num_bytes=end))
            slots, end = [], 0
        slots.append(Slot(spec=spec, offset=end, num_bytes=length))
        end += -(-length // ALIGNMENT) * ALIGNMENT
    if slots:
        buckets.append(Bucket(slots=tuple(slots), num_bytes=end))
    return tuple(buckets)
