"""Transport `shared_memory`: one copy of the weights in memory that all processes of a host can map.

Data flow:  trainer rank 0 writes tensors ─► anonymous memory file ─ /proc/<pid>/fd/<fd> ─► engines map it

Invariants:
    - The file has no name (`memfd_create`), so nothing is left in /dev/shm, whichever process dies and however: the
      kernel frees it with its last user. The size limit of /dev/shm, 64 MiB in a default container, does not apply.
    - The file is kept from sync to sync, because the first write takes fifteen times as long as a later one. After a
      failed sync it is closed, because a receiver that gave up late may still read it.
    - A handle names process, descriptor and inode, so that a reused process id is not mistaken for the sender.
    - `stage` writes tensors through a descriptor of its own: if the sync is given up in the meantime, another thread
      closes the file, and its descriptor number may be reused for any other file at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from roll.errors import UnsupportedError, WeightSyncError
from roll.protocols import WeightSource
from roll.types import TensorSpec, WeightUpdate
from roll.weights.checksum import flat_bytes, tensor_checksum
from roll.weights.collective_iteration import iterate_to_end
from roll.weights.plan import ALIGNMENT, dtype_of, plan_buckets, spec_of
from roll.weights.receiver import ReceiverLocation, TensorStream

__all__ = ["SegmentHandle", "SharedMemorySender", "receive"]

COPY_THREADS = 2
"""Number of copying threads: one core does not use the whole memory bandwidth, and engines wait for the copy."""
MAX_WAITING = 8
"""Largest number of tensors that wait for a thread."""
WRITE_BYTES = 2**30
"""Largest write: Linux writes at most about 2 GiB in one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHandle:
    """The location of the memory file."""

    process_id: int
    descriptor: int
    inode: int
    num_bytes: int


class SharedMemorySender:
    """The trainer's end. Holds host memory of the model's size between syncs."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._opening = threading.Lock()
        self._checksums: dict[str, int] = {}

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Write all weights; return `None` on ranks other than 0."""
        with contextlib.ExitStack() as stack:
            return self._stage(source, policy_version, stack)

    def _stage(self, source: WeightSource, policy_version: int, stack: contextlib.ExitStack) -> WeightUpdate | None:
        manifest: list[TensorSpec] = []
        copies: list[Future[int]] = []
        end, descriptor = 0, -1
        pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="stage-weights")
        with pool, iterate_to_end(source) as tensors:
            for name, tensor in tensors:
                if tensor is None:
                    continue
                if descriptor < 0:
                    descriptor = self._open()
                    stack.callback(os.close, descriptor)
                manifest.append(spec_of(name, tensor))
                start = -(-end // ALIGNMENT) * ALIGNMENT
                end = start + tensor.numel() * tensor.element_size()
                copies.append(pool.submit(_hash_and_copy, tensor, descriptor, start))
                if len(copies) > MAX_WAITING:  # a merged or gathered tensor uses memory of its own until it is copied
                    copies[-MAX_WAITING].result()
        if not manifest:
            return None
        self._checksums = {spec.name: copy.result() for spec, copy in zip(manifest, copies, strict=True)}
        if os.fstat(descriptor).st_size < end:  # the last tensor is empty, so nothing was written at its offset
            os.ftruncate(descriptor, end)
        kept, inode = self._descriptor, os.fstat(descriptor).st_ino
        if kept is None:
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: it was aborted while it was staged."
            )
        handle = SegmentHandle(process_id=os.getpid(), descriptor=kept, inode=inode, num_bytes=end)
        return WeightUpdate(
            policy_version=policy_version, manifest=tuple(manifest), transport="shared_memory", handle=handle
        )

    def send(self) -> dict[str, int]:
        """Return the checksums; all data is written already."""
        return self._checksums

    def release(self, failed: bool) -> None:
        """Keep the file for the next sync, unless this one failed."""
        if failed:
            self.close()

    def close(self) -> None:
        """Close the file; its memory is freed when no engine maps it any more."""
        with self._opening:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        """Return a new descriptor of the file, which the caller must close."""
        with self._opening:
            if self._descriptor is None:
                if not hasattr(os, "memfd_create"):
                    raise UnsupportedError(
                        "weight_sync.transport=shared_memory needs Linux; use in_process or broadcast here."
                    )
                self._descriptor = os.memfd_create("roll-weights")
            return os.dup(self._descriptor)


def _hash_and_copy(tensor: torch.Tensor, descriptor: int, offset: int) -> int:
    """Write a tensor's bytes at their offset; return their checksum."""
    data = flat_bytes(tensor).cpu().numpy().data
    while data:
        written = os.pwrite(descriptor, data[:WRITE_BYTES], offset)
        data, offset = data[written:], offset + written
    return tensor_checksum(tensor)


@contextmanager
def receive(update: WeightUpdate, place: ReceiverLocation) -> Generator[TensorStream]:
    """Map the file. The yielded tensors are private views: writes to them do not reach the sender."""
    handle: SegmentHandle = update.handle
    with _open_segment(handle, update.policy_version) as descriptor:
        mapped = mmap.mmap(descriptor, handle.num_bytes, access=mmap.ACCESS_COPY) if handle.num_bytes else b""
    yield _tensors(update, mapped)


@contextmanager
def _open_segment(handle: SegmentHandle, policy_version: int) -> Generator[int]:
    about = f"weight sync of policy version {policy_version}"
    path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError as error:
        raise WeightSyncError(
            f"{about}: this process has no permission to open the trainer's memory at {path}: run trainer and engines "
            "as one user and in one container, or set weight_sync.transport=broadcast."
        ) from error
    except OSError as error:
        raise WeightSyncError(
            f"{about}: the trainer's memory at {path} cannot be opened: its process ended, the update was "
            "released, or it is on another host or in another container (then set "
            "weight_sync.transport=broadcast)."
        ) from error
    try:
        status = os.fstat(descriptor)
        if status.st_ino != handle.inode:
            raise WeightSyncError(f"{about}: {path} is not the memory that was offered: the trainer restarted.")
        if status.st_size < handle.num_bytes:
            raise WeightSyncError(f"{about}: {path} has {status.st_size} bytes, expected {handle.num_bytes}.")
        yield descriptor
    finally:
        os.close(descriptor)


def _tensors(update: WeightUpdate, mapped: mmap.mmap | bytes) -> TensorStream:
    for bucket in plan_buckets(update.manifest, bucket_bytes=2**63):
        for slot in bucket.slots:
            dtype, spec = dtype_of(slot.spec), slot.spec
            if slot.num_bytes == 0:
                yield spec.name, torch.empty(spec.shape, dtype=dtype)
            else:
                flat = torch.frombuffer(mapped, dtype=dtype, count=spec.num_elements, offset=slot.offset)
                yield spec.name, flat.reshape(spec.shape)
