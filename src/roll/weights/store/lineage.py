"""The versions of one set of weights: a copy of the newest version in host memory, and the files in the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from roll.errors import WeightSyncError
from roll.protocols import WeightSource
from roll.types import TensorSpec
from roll.weights.checksum import compute_checksum, to_flat_bytes
from roll.weights.collective_iteration import iterate_to_end
from roll.weights.plan import Bucket, compute_num_bytes, describe_tensor, get_dtype, plan_buckets
from roll.weights.store.delta import TensorDelta, count_changes, encode_delta, encode_full
from roll.weights.store.files import StoreFiles, run_concurrently
from roll.weights.store.handle import MANIFEST_NAME, StoredBucket, StoredTensor, StoredVersion, VersionManifest

__all__ = ["Lineage", "TensorChange", "WeightChanges"]

BUCKET_BYTES = 32 * 2**20
"""Size of a bucket. Buckets are transferred concurrently, and a bucket is the unit of retries."""
NUM_ENCODING_THREADS = 2
MAX_PENDING_TENSORS = 8


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChange:
    """A tensor of a new version, and its changes since the previous version."""

    spec: TensorSpec
    checksum: int
    num_changed: int
    """Number of elements that differ from the previous version; all elements if there is no previous version."""
    delta: TensorDelta | None
    """The delta against the previous version; `None` if a full copy is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightChanges:
    """All tensors of a new version."""

    tensors: tuple[TensorChange, ...]
    is_delta: bool
    """True if the version is written as a delta."""
    num_changed: int | None
    """Number of elements that differ from the previous version; `None` if there is no previous version."""


class _DeltaBudget:
    """The byte budget for the deltas of a version. If the deltas exceed it, a full copy is written."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes_left = num_bytes

    @property
    def is_exceeded(self) -> bool:
        return self._num_bytes_left < 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes_left -= num_bytes


class Lineage:
    """The versions of the policy's weights, or of an adapter's weights.

    Args:
        directory: The directory of the versions in the store.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.specs: tuple[TensorSpec, ...] = ()
        self.checksums: dict[str, int] = {}
        self.chain: tuple[StoredVersion, ...] = ()
        """The newest full copy, then all deltas up to the newest version."""
        self.policy_version = -1
        """Policy version of the newest version."""
        self._tensors: dict[str, NDArray[np.uint8]] = {}
        self._has_copy = False
        """True if `_tensors` are equal to the newest version in the store."""
        self._num_versions = 0
        self._obsolete: list[str] = []

    def discard_chain(self) -> None:
        """Make the next version a full copy, because engines may not have received the newest version."""
        self._obsolete += [version.name for version in self.chain]
        self.chain = ()

    def collect(self, source: WeightSource, full_copy_every: int) -> WeightChanges | None:
        """Copy the weights to host memory, and encode the changes; return `None` on ranks other than 0.

        Args:
            source: The weights; iterating is collective over all ranks.
            full_copy_every: The maximum length of a chain of versions: a full copy and the deltas that follow it.
        """
        had_copy, self._has_copy = self._has_copy, False  # until all tensors are copied
        full_bytes = sum(compute_num_bytes(spec) for spec in self.specs)
        # The deltas of a chain are smaller than a full copy. This limits the bytes that a new engine must fetch.
        budget = _DeltaBudget(full_bytes - 1 - sum(version.num_bytes for version in self.chain[1:]))
        may_use_deltas = had_copy and 0 < len(self.chain) < full_copy_every
        pending: list[Future[TensorChange]] = []
        with ThreadPoolExecutor(NUM_ENCODING_THREADS, "encode-weights") as pool, iterate_to_end(source) as tensors:
            for name, tensor in tensors:
                if tensor is None:
                    continue
                spec = describe_tensor(name, tensor)
                pending.append(pool.submit(self._copy_and_encode, spec, tensor, budget if may_use_deltas else None))
                if len(pending) > MAX_PENDING_TENSORS:  # a gathered tensor takes extra memory until it is copied
                    pending[-MAX_PENDING_TENSORS].result()
        if not pending:
            return None
        changes = tuple(future.result() for future in pending)
        specs = tuple(change.spec for change in changes)
        same_specs = had_copy and specs == self.specs
        self._tensors = {spec.name: self._tensors[spec.name] for spec in specs}
        self.specs, self._has_copy = specs, True
        self.checksums = {change.spec.name: change.checksum for change in changes}
        return WeightChanges(
            tensors=changes,
            is_delta=may_use_deltas and same_specs and not budget.is_exceeded,
            num_changed=sum(change.num_changed for change in changes) if same_specs else None,
        )

    def publish(self, files: StoreFiles, policy_version: int, changes: WeightChanges) -> None:
        """Write the collected weights as a new version, and delete versions that no engine needs any more.

        Raises:
            WeightSyncError: a file cannot be written; the message names the file.
        """
        self._delete_obsolete(files)
        serial, self._num_versions = self._num_versions, self._num_versions + 1
        self._has_copy = False  # until the version is complete in the store
        deltas = [
            change.delta
            if changes.is_delta and change.delta is not None
            else encode_full(self._tensors[change.spec.name], change.num_changed)
            for change in changes.tensors
        ]
        name = f"{serial:08d}"
        self._obsolete.append(name)
        plan = _plan_payloads(changes.tensors, deltas)
        payloads = {change.spec.name: delta.payload for change, delta in zip(changes.tensors, deltas, strict=True)}

        def write_bucket(number: int) -> StoredBucket:
            data = bytearray(plan[number].num_bytes)
            for slot in plan[number].slots:
                data[slot.offset : slot.offset + slot.num_bytes] = payloads[slot.spec.name]
            bucket = f"bucket-{number:05d}"
            checksum = files.write(f"{self.directory}/{name}/{bucket}", data)
            return StoredBucket(name=bucket, num_bytes=len(data), checksum=checksum)

        manifest = VersionManifest(
            policy_version=policy_version,
            serial=serial,
            base=self.chain[-1].serial if changes.is_delta else None,
            buckets=tuple(run_concurrently(write_bucket, range(len(plan)))),
            tensors=tuple(_describe_payloads(changes.tensors, deltas, plan)),
        )
        content = manifest.to_json()
        version = StoredVersion(
            serial=serial,
            manifest_checksum=files.write(f"{self.directory}/{name}/{MANIFEST_NAME}", content),
            manifest_bytes=len(content),
            num_bytes=sum(bucket.num_bytes for bucket in manifest.buckets),
        )
        self._obsolete.remove(name)
        if not changes.is_delta:
            self.discard_chain()
        self.chain += (version,)
        self.policy_version, self._has_copy = policy_version, True

    def _copy_and_encode(self, spec: TensorSpec, tensor: torch.Tensor, budget: _DeltaBudget | None) -> TensorChange:
        flat: NDArray[np.uint8] = to_flat_bytes(tensor).cpu().numpy()
        copy = self._tensors.get(spec.name)
        num_changed, delta = spec.num_elements, None
        if copy is None or copy.size != flat.size:
            self._tensors[spec.name] = flat.copy()
        else:
            itemsize = get_dtype(spec).itemsize
            if budget is not None and not budget.is_exceeded:
                delta = encode_delta(copy, flat, itemsize)
                budget.add(len(delta.payload))
            num_changed = count_changes(copy, flat, itemsize) if delta is None else delta.num_changed
            np.copyto(copy, flat)
            if delta is not None and delta.encoding == "dense":  # refers to the trainer's tensor, which is not kept
                delta = encode_full(copy, num_changed)
        return TensorChange(spec=spec, checksum=compute_checksum(tensor), num_changed=num_changed, delta=delta)

    def _delete_obsolete(self, files: StoreFiles) -> None:
        """Delete obsolete versions; if a version cannot be deleted, retry in the next sync."""
        obsolete, self._obsolete = self._obsolete, []
        for name in obsolete:
            try:
                files.delete(f"{self.directory}/{name}")
            except WeightSyncError as error:
                logger.warning("an obsolete version of the weights remains in the store: %s", error)
                self._obsolete.append(name)


def _plan_payloads(changes: Sequence[TensorChange], deltas: Sequence[TensorDelta]) -> tuple[Bucket, ...]:
    specs = [
        TensorSpec(name=change.spec.name, shape=(len(delta.payload),), dtype="uint8")
        for change, delta in zip(changes, deltas, strict=True)
    ]
    return plan_buckets(specs, BUCKET_BYTES)


def _describe_payloads(
    changes: Sequence[TensorChange], deltas: Sequence[TensorDelta], plan: Sequence[Bucket]
) -> Iterator[StoredTensor]:
    slots = [(index, slot) for index, bucket in enumerate(plan) for slot in bucket.slots]
    for change, delta, (index, slot) in zip(changes, deltas, slots, strict=True):
        yield StoredTensor(
            name=change.spec.name,
            shape=change.spec.shape,
            dtype=change.spec.dtype,
            checksum=change.checksum,
            encoding=delta.encoding,
            num_changed=delta.num_changed,
            is_compressed=delta.is_compressed,
            bucket=index,
            offset=slot.offset,
            num_bytes=slot.num_bytes,
        )
