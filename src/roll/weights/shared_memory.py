"""Transport `shared_memory`: one copy of the weights in memory that all processes of a host can map.

Data flow:  trainer rank 0 writes tensors ─► anonymous memory file ─ /proc/<pid>/fd/<fd> ─► engines map it

Invariants:
    - The file has no name (`memfd_create`), so nothing remains in /dev/shm when a process dies: the kernel frees the
      memory when its last user ends. The size limit of /dev/shm, 64 MiB in a default container, does not apply.
    - The file is reused by the next sync, because the first write takes fifteen times as long as later ones. After a
      failed sync it is closed, because a slow receiver may still be reading it.
    - A handle contains process, descriptor and inode, so that a reused process ID is not mistaken for the sender.
    - `stage` writes through a duplicate of the descriptor: if the sync is aborted in the meantime, another thread
      closes the file, and its descriptor number may immediately be reused for another file.
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
from roll.weights.checksum import compute_checksum, to_flat_bytes
from roll.weights.collective_iteration import iterate_to_end
from roll.weights.plan import ALIGNMENT, describe_tensor, get_dtype, plan_buckets
from roll.weights.receiver import ReceiverLocation, TensorStream

__all__ = ["SegmentHandle", "SharedMemorySender", "map_tensors", "receive"]

NUM_COPY_THREADS = 2
"""Number of threads that copy tensors: a single core cannot use the whole memory bandwidth."""
MAX_PENDING_COPIES = 8
"""Maximum number of tensors that wait for a copying thread."""
MAX_WRITE_BYTES = 2**30
"""Maximum number of bytes per write: Linux writes at most about 2 GiB in one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHandle:
    """The data that an engine needs to map the memory file."""

    process_id: int
    descriptor: int
    inode: int
    num_bytes: int


class SharedMemorySender:
    """The trainer's end of the transport `shared_memory`. Between syncs it keeps host memory of the model's size."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._opening = threading.Lock()
        self._checksums: dict[str, int] = {}

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Write all weights to the shared memory file; return the update, or `None` on ranks other than 0."""
        with contextlib.ExitStack() as stack:
            return self._stage(source, policy_version, stack)

    def _stage(self, source: WeightSource, policy_version: int, stack: contextlib.ExitStack) -> WeightUpdate | None:
        manifest: list[TensorSpec] = []
        copies: list[Future[int]] = []
        end, descriptor = 0, -1
        pool = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="stage-weights")
        with pool, iterate_to_end(source) as tensors:
            for name, tensor in tensors:
                if tensor is None:
                    continue
                if descriptor < 0:
                    descriptor = self._open()
                    stack.callback(os.close, descriptor)
                manifest.append(describe_tensor(name, tensor))
                start = -(-end // ALIGNMENT) * ALIGNMENT
                end = start + tensor.numel() * tensor.element_size()
                copies.append(pool.submit(_hash_and_copy, tensor, descriptor, start))
                if (
                    len(copies) > MAX_PENDING_COPIES
                ):  # a merged or gathered tensor takes extra memory until it is copied
                    copies[-MAX_PENDING_COPIES].result()
        if not manifest:
            return None
        self._checksums = {spec.name: copy.result() for spec, copy in zip(manifest, copies, strict=True)}
        if os.fstat(descriptor).st_size < end:  # the last tensor is empty, so nothing was written at its offset
            os.ftruncate(descriptor, end)
        # Another thread may have closed the file in the meantime: see the last invariant.
        kept, inode = self._descriptor, os.fstat(descriptor).st_ino
        if kept is None:
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: the sync was aborted while weights were being staged."
            )
        handle = SegmentHandle(process_id=os.getpid(), descriptor=kept, inode=inode, num_bytes=end)
        return WeightUpdate(
            policy_version=policy_version, manifest=tuple(manifest), transport="shared_memory", handle=handle
        )

    def send(self) -> dict[str, int]:
        """Return the checksums by tensor name; `stage` has already written all data."""
        return self._checksums

    def release(self, failed: bool) -> None:
        """Close the shared memory file if the sync failed; otherwise keep it open for the next sync."""
        if failed:
            self.close()

    def close(self) -> None:
        """Close the shared memory file; its memory is freed when no engine maps it any more."""
        with self._opening:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        """Return a duplicate descriptor of the file, created on first use; the caller must close the descriptor."""
        with self._opening:
            if self._descriptor is None:
                if not hasattr(os, "memfd_create"):
                    raise UnsupportedError(
                        "weight_sync.transport=shared_memory requires Linux; use in_process or broadcast here."
                    )
                self._descriptor = os.memfd_create("roll-weights")
            return os.dup(self._descriptor)


def _hash_and_copy(tensor: torch.Tensor, descriptor: int, offset: int) -> int:
    """Write a tensor's bytes at an offset; return their checksum."""
    data = to_flat_bytes(tensor).cpu().numpy().data
    while data:
        written = os.pwrite(descriptor, data[:MAX_WRITE_BYTES], offset)
        data, offset = data[written:], offset + written
    return compute_checksum(tensor)


@contextmanager
def receive(update: WeightUpdate, location: ReceiverLocation) -> Generator[TensorStream]:
    """Map the shared memory file; yield a stream of its tensors, which are copy-on-write views."""
    handle: SegmentHandle = update.handle
    with _open_segment(handle, update.policy_version) as descriptor:
        # Copy-on-write: an engine cannot change the sender's memory. For read-only memory, `torch.frombuffer` warns.
        mapped = mmap.mmap(descriptor, handle.num_bytes, access=mmap.ACCESS_COPY) if handle.num_bytes else b""
    yield map_tensors(update, mapped)


@contextmanager
def _open_segment(handle: SegmentHandle, policy_version: int) -> Generator[int]:
    sync_name = f"weight sync of policy version {policy_version}"
    path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError as error:
        raise WeightSyncError(
            f"{sync_name}: this process has no permission to open the trainer's memory at {path}: run trainer and "
            "engines as one user and in one container, or set weight_sync.transport=broadcast."
        ) from error
    except OSError as error:
        raise WeightSyncError(
            f"{sync_name}: the trainer's memory at {path} cannot be opened: the trainer has ended, the update was "
            "released, or the trainer is on another host or in another container (then set "
            "weight_sync.transport=broadcast)."
        ) from error
    try:
        # The process id or the descriptor may have been reused.
        status = os.fstat(descriptor)
        if status.st_ino != handle.inode:
            raise WeightSyncError(
                f"{sync_name}: {path} does not contain this update, because the trainer was restarted."
            )
        if status.st_size < handle.num_bytes:
            raise WeightSyncError(f"{sync_name}: {path} has {status.st_size} bytes, expected {handle.num_bytes}.")
        yield descriptor
    finally:
        os.close(descriptor)


def map_tensors(update: WeightUpdate, mapped: mmap.mmap | bytes) -> TensorStream:
    """Yield the tensors of an update as views of memory that contains all of them as a single bucket."""
    for bucket in plan_buckets(update.manifest, bucket_bytes=2**63):
        for slot in bucket.slots:
            dtype, spec = get_dtype(slot.spec), slot.spec
            if slot.num_bytes == 0:
                yield spec.name, torch.empty(spec.shape, dtype=dtype)
            else:
                flat = torch.frombuffer(mapped, dtype=dtype, count=spec.num_elements, offset=slot.offset)
                yield spec.name, flat.reshape(spec.shape)
