"""The local copy of the weights on an engine's host, from which engines apply updates and reconstruct deltas.

All engines of a host share the copy, so a host fetches each version once. The copy is a file with all tensors, which
`shared_memory.map_tensors` reads. To build a new version, the file of the last version is copied and changed, so both
exist for a short time. The file of a version is complete and verified when it has its final name.

Each process that uses the directory of a copy holds a shared lock on a file in it, which the kernel releases when the
process ends. The next process that opens a copy deletes directories without locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from roll.errors import WeightSyncError, one_line_error
from roll.types import TensorSpec
from roll.weights.checksum import compute_checksum
from roll.weights.plan import BucketSlot, get_dtype, plan_buckets
from roll.weights.store.delta import TensorDelta, apply_delta
from roll.weights.store.files import StoreFiles, run_concurrently
from roll.weights.store.handle import MANIFEST_NAME, StoredBucket, StoredVersion, StoreHandle, VersionManifest

__all__ = ["LocalCopy", "find_local_file"]

USERS_LOCK = "users.lock"


class _CorruptedCopyError(WeightSyncError):
    """A local copy has an incorrect size, or a reconstructed tensor an incorrect checksum."""


def find_local_file(handle: StoreHandle) -> Path:
    """Return the path of the local file with the newest version of a handle, whether it exists or not."""
    return _find_directory(handle) / f"{handle.chain[-1].name}.weights"


class LocalCopy:
    """The local copy of the weights in one directory of a store.

    Args:
        handle: A handle of these weights.

    Raises:
        WeightSyncError: the directory for local copies cannot be used.
    """

    def __init__(self, handle: StoreHandle) -> None:
        self._directory = _find_directory(handle)
        with _convert_disk_errors(self._directory):
            self._users = _open_directory(self._directory)

    def fetch(
        self,
        handle: StoreHandle,
        manifest: Sequence[TensorSpec],
        timeout_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Return the file of the handle's newest version; if it does not exist, fetch it or wait for another process.

        Args:
            handle: The version to fetch.
            manifest: The tensors of the update.
            timeout_s: The maximum time to wait while another process on this host fetches weights, in seconds.
            is_cancelled: A function that returns True if the caller has canceled the operation.

        Raises:
            WeightSyncError: a file in the store is missing or corrupted, or the disk is full; the message names the
                file.
        """
        path = find_local_file(handle)
        lock = FileLock(self._directory / "fetch.lock", is_singleton=False)
        try:
            acquired = lock.acquire(timeout=timeout_s)
        except Timeout as error:
            raise WeightSyncError(
                f"local copy '{self._directory}': another process did not finish fetching the weights within "
                f"{timeout_s:.0f} s: check the connection of this host to the weight store '{handle.url}'."
            ) from error
        build = _CopyBuilder(handle, manifest, StoreFiles(handle.url, is_cancelled), self._directory)
        with acquired, _convert_disk_errors(self._directory):
            if path.exists():
                if path.stat().st_size == build.num_bytes:
                    return path
                path.unlink()  # another program has changed it
            held = {file.stem for file in self._directory.glob("*.weights")}
            base = next((version for version in reversed(handle.chain) if version.name in held), None)
            try:
                build(base, path)
            except _CorruptedCopyError:
                if base is None:
                    raise
                build(None, path)  # the file of the last version was corrupted, not the store
            for name in held:
                (self._directory / f"{name}.weights").unlink(missing_ok=True)
        return path

    def close(self) -> None:
        """Delete the local copy if no other process uses it. Calling it twice is safe."""
        if self._users < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._directory)
        os.close(self._users)
        self._users = -1


class _CopyBuilder:
    """Builds the file of a version from the store."""

    def __init__(self, handle: StoreHandle, manifest: Sequence[TensorSpec], files: StoreFiles, directory: Path) -> None:
        self._handle = handle
        self._files = files
        self._directory = directory
        buckets = plan_buckets(manifest, bucket_bytes=2**63)
        self._slots = {slot.spec.name: slot for bucket in buckets for slot in bucket.slots}
        self.num_bytes = sum(bucket.num_bytes for bucket in buckets)
        """Size of the file."""

    def __call__(self, base: StoredVersion | None, path: Path) -> None:
        """Build the newest version from a local version `base`, or from the full copy in the store."""
        chain = self._handle.chain
        missing = chain if base is None else chain[chain.index(base) + 1 :]
        temporary = self._directory / "building"
        if base is not None:
            shutil.copyfile(self._directory / f"{base.name}.weights", temporary)
            if (size := temporary.stat().st_size) != self.num_bytes:
                raise _CorruptedCopyError(
                    f"local copy '{self._directory}/{base.name}.weights' has {size} bytes, expected {self.num_bytes}."
                )
        elif self.num_bytes:
            with temporary.open("wb") as file:  # reserves the space: writing to a mapped file on a full disk is fatal
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
        else:
            temporary.touch()
        target = np.memmap(temporary, np.uint8, "r+") if self.num_bytes else np.empty(0, np.uint8)
        *_, manifest = [self._apply(version, target) for version in missing]
        for tensor in manifest.tensors:
            if compute_checksum(torch.from_numpy(self._get_bytes(target, self._slots[tensor.name]))) != tensor.checksum:
                raise _CorruptedCopyError(
                    f"weight store '{self._handle.url}': tensor '{tensor.name}' of policy version "
                    f"{manifest.policy_version} was reconstructed with a wrong checksum from "
                    f"'{self._handle.directory}/{missing[-1].name}': resume the run."
                )
        os.replace(temporary, path)

    def _apply(self, version: StoredVersion, target: NDArray[np.uint8]) -> VersionManifest:
        directory = f"{self._handle.directory}/{version.name}"
        content = self._files.read(f"{directory}/{MANIFEST_NAME}", version.manifest_bytes, version.manifest_checksum)
        manifest = VersionManifest.from_json(content)

        def read(bucket: StoredBucket) -> bytes:
            return self._files.read(f"{directory}/{bucket.name}", bucket.num_bytes, bucket.checksum)

        for number, data in enumerate(run_concurrently(read, manifest.buckets)):
            for tensor in manifest.tensors:
                if tensor.bucket != number:
                    continue
                delta = TensorDelta(
                    encoding=tensor.encoding,
                    num_changed=tensor.num_changed,
                    is_compressed=tensor.is_compressed,
                    payload=memoryview(data)[tensor.offset : tensor.offset + tensor.num_bytes],
                )
                slot = self._slots[tensor.name]
                apply_delta(self._get_bytes(target, slot), delta, get_dtype(slot.spec).itemsize)
        return manifest

    @staticmethod
    def _get_bytes(target: NDArray[np.uint8], slot: BucketSlot) -> NDArray[np.uint8]:
        return np.asarray(target[slot.offset : slot.offset + slot.num_bytes])


def _find_directory(handle: StoreHandle) -> Path:
    root = Path(handle.local_dir or tempfile.gettempdir()) / f"roll-weights-{os.getuid()}"
    return root / hashlib.sha256(f"{handle.url}\n{handle.directory}".encode()).hexdigest()[:24]


def _open_directory(directory: Path) -> int:
    """Create a directory, delete unused directories next to it, and return a descriptor with a shared lock."""
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if directory.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"'{directory.parent}' belongs to another user")
    for other in directory.parent.iterdir():
        if other != directory:
            _delete_if_unused(other)
    while True:
        directory.mkdir(exist_ok=True)
        try:
            descriptor = os.open(directory / USERS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except FileNotFoundError:  # another process has just deleted the directory
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(directory / USERS_LOCK)):
                return descriptor
        os.close(descriptor)


def _delete_if_unused(directory: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory / USERS_LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _convert_disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(
            f"local copy of the weights in '{directory}': {one_line_error(error)}. Free space for two copies of the "
            "weights, or set weight_sync.local_copy_dir to another directory."
        ) from error
