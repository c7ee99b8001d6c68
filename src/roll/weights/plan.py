"""Plans a sync: describes tensors and assigns them to buckets. Pure functions.

Tensors have the names and the order of the `WeightSource`: HF checkpoint names, tied weights once, LoRA merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roll.errors import WeightSyncError
from roll.types import TensorSpec

__all__ = [
    "ALIGNMENT",
    "Bucket",
    "BucketSlot",
    "compute_num_bytes",
    "compute_total_bytes",
    "describe_tensor",
    "get_dtype",
    "plan_buckets",
]

ALIGNMENT = 64
"""The offset of every tensor is a multiple of this number of bytes: the size of a cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSlot:
    """The location of a tensor in its bucket."""

    spec: TensorSpec
    offset: int
    """The offset in the bucket in bytes, a multiple of `ALIGNMENT`."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that are sent together; a tensor is never split over buckets."""

    slots: tuple[BucketSlot, ...]
    num_bytes: int
    """The size including the gaps between tensors, a multiple of `ALIGNMENT`."""


def describe_tensor(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return a tensor's name, shape and dtype as a manifest entry."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def get_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of a manifest entry.

    Raises:
        WeightSyncError: this version of torch does not have the dtype.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(
            f"tensor '{spec.name}' has dtype '{spec.dtype}', which this version of torch does not support."
        )
    return dtype


def compute_num_bytes(spec: TensorSpec) -> int:
    """Return the size of a tensor in bytes."""
    return spec.num_elements * get_dtype(spec).itemsize


def compute_total_bytes(manifest: Sequence[TensorSpec]) -> int:
    """Return the total size of a manifest's tensors in bytes, without alignment gaps."""
    return sum(compute_num_bytes(spec) for spec in manifest)


def plan_buckets(manifest: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Assign tensors to buckets of at most `bucket_bytes`, in manifest order.

    A tensor is never split: if it is larger than `bucket_bytes`, it gets a separate bucket.
    """
    buckets: list[Bucket] = []
    slots: list[BucketSlot] = []
    end = 0
    for spec in manifest:
        length = compute_num_bytes(spec)
        if slots and end + length > bucket_bytes:
            buckets.append(Bucket(slots=tuple(slots), num_bytes=end))
            slots, end = [], 0
        slots.append(BucketSlot(spec=spec, offset=end, num_bytes=length))
        end += -(-length // ALIGNMENT) * ALIGNMENT
    if slots:
        buckets.append(Bucket(slots=tuple(slots), num_bytes=end))
    return tuple(buckets)
