"""Transport `broadcast`, the trainer's end. See `broadcast` for the data flow and `rendezvous` for the connection."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch

from roll.errors import WeightSyncError
from roll.protocols import WeightSource
from roll.types import TensorSpec, WeightUpdate
from roll.weights.authenticated_store import AuthenticatedStore, StoreServer
from roll.weights.broadcast import BroadcastHandle
from roll.weights.checksum import compute_checksum, to_flat_bytes
from roll.weights.collective_iteration import iterate_to_end
from roll.weights.plan import Bucket, describe_tensor, plan_buckets
from roll.weights.rendezvous import (
    BroadcastGroup,
    BroadcastMember,
    Rendezvous,
    build_group,
    choose_backend,
    convert_group_errors,
    get_device_name,
)

__all__ = ["BroadcastSender"]

MAX_BUCKET_BYTES = 32 * 2**20
"""Maximum bucket size. Packing, transfer and unpacking overlap by bucket, so large buckets only delay the first one."""


class BroadcastSender:
    """The trainer's end of the transport `broadcast`. It keeps two buckets in memory, never the whole model.

    The manifest must be known before tensors are sent, so the first sync iterates over the source twice.
    """

    def __init__(self, *, bucket_bytes: int, host: str, timeout_s: float) -> None:
        self._bucket_bytes = min(bucket_bytes, MAX_BUCKET_BYTES)
        self._host = host
        self._timeout_s = timeout_s
        self._server: StoreServer | None = None
        self._store: AuthenticatedStore | None = None
        self._group: BroadcastGroup | None = None
        self._numbers = itertools.count()
        self._names: tuple[str, ...] = ()
        self._manifest: tuple[TensorSpec, ...] = ()
        self._device = torch.device("cpu")
        self._released = threading.Event()
        self._source: WeightSource | None = None
        self._rendezvous: Rendezvous | None = None
        self._keys: list[str] = []

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Open the rendezvous; no data is copied."""
        self._released.clear()
        self._source = source
        # Iterating is collective: every rank does it if the names have changed.
        self._describe(source)
        if not self._manifest:
            return None
        if self._store is None:
            self._server = StoreServer(self._host)
            self._store = self._connect()
        sync = f"sync/{next(self._numbers)}"
        sync_name = f"weight sync of policy version {policy_version}"
        self._rendezvous = Rendezvous(self._store, sync, sync_name, self._timeout_s)
        self._keys = []
        assert self._server is not None
        handle = BroadcastHandle(
            host=self._host,
            port=self._server.port,
            secret=self._server.secret,
            sync=sync,
            bucket_bytes=self._bucket_bytes,
        )
        return WeightUpdate(
            policy_version=policy_version, manifest=self._manifest, transport="broadcast", handle=handle
        )

    def send(self) -> dict[str, int]:
        """Wait until all engines have joined, then stream the weights; ranks other than 0 only iterate over them.

        All ranks iterate even if the sync has been aborted, because other ranks may have started iterating.
        """
        rendezvous = self._rendezvous
        if self._source is None:
            raise WeightSyncError("no weights are staged: `stage` must be called before `send`.")
        with iterate_to_end(self._source) as tensors:
            if self._released.is_set():
                raise WeightSyncError("the weight sync was aborted before every engine had joined.")
            if rendezvous is None:
                return {}
            group, self._group = self._wait_for_engines(rendezvous), None
            try:
                checksums = self._stream(group, tensors, rendezvous.sync_name)
            except BaseException:
                group.abort()
                raise
            self._group = group  # only a group that worked is reused
            return checksums

    def release(self, failed: bool) -> None:
        """Abort the sync if it failed; after a success, keep the process group for the next sync."""
        self._released.set()
        if failed:
            if self._rendezvous is not None:
                self._rendezvous.write("verdict", {"abandoned": "another engine failed, or the sender did"})
            self._group = None
        elif self._rendezvous is not None:
            self._rendezvous.delete_values(self._keys)
        self._rendezvous = None

    def close(self) -> None:
        """Free the process group, the buffers and the store."""
        if self._server is not None:
            self._server.close()
        self._group = self._store = self._server = self._source = None

    def _connect(self) -> AuthenticatedStore:
        assert self._server is not None
        timeout = timedelta(seconds=self._timeout_s)
        return AuthenticatedStore(self._host, self._server.port, self._server.secret, timeout=timeout)

    def _describe(self, source: WeightSource) -> None:
        names = tuple(source.names())
        if names == self._names:
            return
        manifest: list[TensorSpec] = []
        for name, tensor in source:
            if tensor is not None:
                manifest.append(describe_tensor(name, tensor))
                self._device = tensor.device
        self._manifest, self._names = tuple(manifest), names

    def _wait_for_engines(self, rendezvous: Rendezvous) -> BroadcastGroup:
        def check_active() -> None:
            if self._released.is_set():
                raise WeightSyncError(f"{rendezvous.sync_name}: the sync was aborted before every engine had joined.")

        members = tuple(BroadcastMember(*each) for each in rendezvous.read("members", "no engine joined", check_active))
        keys = [f"hello/{rank}" for rank in range(1, 1 + len(members))]
        self._keys = ["members", "verdict", *keys]
        hellos = [
            rendezvous.read(key, f"engine '{member.engine_id}' did not join", check_active)
            for key, member in zip(keys, members, strict=True)
        ]
        cached = self._group
        if cached is not None and cached.members == members and all(hello["group"] == cached.key for hello in hellos):
            rendezvous.write("verdict", {"group": cached.key, "backend": cached.backend})
            return cached
        del cached
        self._group = None
        key = uuid.uuid4().hex
        backend = choose_backend([get_device_name(self._device), *(hello["device"] for hello in hellos)])
        rendezvous.write("verdict", {"group": key, "backend": backend})
        store = self._connect()  # a separate connection, because joining blocks and `release` must be able to write
        with convert_group_errors(rendezvous.sync_name):
            return build_group(
                store,
                key=key,
                rank=0,
                members=members,
                backend=backend,
                address=self._host,
                timeout_s=self._timeout_s,
            )

    def _stream(
        self, group: BroadcastGroup, source: Iterator[tuple[str, torch.Tensor]], sync_name: str
    ) -> dict[str, int]:
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        tensors = ((name, tensor) for name, tensor in source if tensor is not None)
        checksums: dict[str, int] = {}

        def check_active() -> None:
            if self._released.is_set():
                raise WeightSyncError(f"{sync_name}: the sync was aborted while weights were being sent.")

        for index, bucket in enumerate(plan_buckets(self._manifest, self._bucket_bytes)):
            # There are only two buffers, so the one that is filled next must have been sent.
            if len(group.in_flight) == 2:
                group.finish_oldest(sync_name, check_active)
            check_active()
            buffer = group.get_buffer(index, bucket.num_bytes, device)
            _pack(bucket, tensors, buffer, checksums, sync_name)
            group.start(buffer, sync_name)
        while group.in_flight:
            group.finish_oldest(sync_name, check_active)
        surplus = next(tensors, None)
        if surplus is not None:
            # The next sync must build the manifest again.
            self._names = ()
            raise WeightSyncError(
                f"{sync_name}: the trainer sent tensor '{surplus[0]}', which is not in the manifest: sync again."
            )
        return checksums


def _pack(
    bucket: Bucket,
    tensors: Iterator[tuple[str, torch.Tensor]],
    buffer: torch.Tensor,
    checksums: dict[str, int],
    sync_name: str,
) -> None:
    """Copy the next tensors into a bucket's buffer, and add their checksums to `checksums`."""
    for slot in bucket.slots:
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None or describe_tensor(name, tensor) != slot.spec:
            sent = "no tensor" if name is None or tensor is None else describe_tensor(name, tensor)
            raise WeightSyncError(f"{sync_name}: the manifest has {slot.spec}, but the trainer sent {sent}.")
        checksums[name] = compute_checksum(tensor)
        buffer[slot.offset : slot.offset + slot.num_bytes].copy_(to_flat_bytes(tensor))
