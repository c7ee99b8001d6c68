"""Transport `broadcast`, the trainer's end. `broadcast` describes the data flow, `rendezvous` how the ends meet."""

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
from roll.weights.checksum import flat_bytes, tensor_checksum
from roll.weights.collective_iteration import iterate_to_end
from roll.weights.plan import Bucket, plan_buckets, spec_of
from roll.weights.rendezvous import (
    Group,
    Member,
    Rendezvous,
    build_group,
    common_backend,
    convert_group_errors,
    device_name,
)

__all__ = ["BroadcastSender"]

MAX_BUCKET_BYTES = 32 * 2**20
"""Largest bucket. Larger ones only delay the first one: packing, transfer and unpacking overlap bucket by bucket."""


class BroadcastSender:
    """Streams tensors from the source; holds two buckets, never the whole model.

    The manifest must be known before the tensors: the first sync iterates the source twice, later ones once.
    """

    def __init__(self, *, bucket_bytes: int, host: str, timeout_s: float) -> None:
        self._bucket_bytes = min(bucket_bytes, MAX_BUCKET_BYTES)
        self._host = host
        self._timeout_s = timeout_s
        self._server: StoreServer | None = None
        self._store: AuthenticatedStore | None = None
        self._group: Group | None = None
        self._numbers = itertools.count()
        self._names: tuple[str, ...] = ()
        self._manifest: tuple[TensorSpec, ...] = ()
        self._device = torch.device("cpu")
        self._released = threading.Event()
        self._source: WeightSource | None = None
        self._point: Rendezvous | None = None
        self._keys: list[str] = []

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Open the meeting point; no data is copied."""
        self._released.clear()
        self._source = source
        self._describe(source)
        if not self._manifest:
            return None
        if self._store is None:
            self._server = StoreServer(self._host)
            self._store = self._connect()
        sync = f"sync/{next(self._numbers)}"
        about = f"weight sync of policy version {policy_version}"
        self._point = Rendezvous(self._store, sync, about, self._timeout_s)
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
        """Meet the engines and stream the weights; ranks other than 0 only iterate over them.

        All ranks iterate even if the sync was given up before, because some may have begun already.
        """
        point = self._point
        if self._source is None:
            raise WeightSyncError("there is nothing to send: the weight sync was not staged.")
        with iterate_to_end(self._source) as tensors:
            if self._released.is_set():
                raise WeightSyncError("the weight sync was aborted before every engine had joined.")
            if point is None:
                return {}
            group, self._group = self._meet_engines(point), None
            try:
                checksums = self._stream(group, tensors, point.about)
            except BaseException:
                group.abort()
                raise
            self._group = group  # only a group that worked is reused
            return checksums

    def release(self, failed: bool) -> None:
        """Abort running transfers; keep the group after a success."""
        self._released.set()
        if failed:
            if self._point is not None:
                self._point.write("verdict", {"abandoned": "another engine failed, or the sender did"})
            self._group = None
        elif self._point is not None:
            self._point.forget(self._keys)
        self._point = None

    def close(self) -> None:
        """Free group, buffers and store."""
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
                manifest.append(spec_of(name, tensor))
                self._device = tensor.device
        self._manifest, self._names = tuple(manifest), names

    def _meet_engines(self, point: Rendezvous) -> Group:
        def still_on() -> None:
            if self._released.is_set():
                raise WeightSyncError(f"{point.about}: it was aborted before every engine had joined.")

        members = tuple(Member(*each) for each in point.read("members", "no engine joined", still_on))
        keys = [f"hello/{rank}" for rank in range(1, 1 + len(members))]
        self._keys = ["members", "verdict", *keys]
        hellos = [
            point.read(key, f"engine {member.engine_id} did not come to receive", still_on)
            for key, member in zip(keys, members, strict=True)
        ]
        cached = self._group
        if cached is not None and cached.members == members and all(hello["group"] == cached.key for hello in hellos):
            point.write("verdict", {"group": cached.key, "backend": cached.backend})
            return cached
        del cached
        self._group = None
        key = uuid.uuid4().hex
        backend = common_backend([device_name(self._device), *(hello["device"] for hello in hellos)])
        point.write("verdict", {"group": key, "backend": backend})
        store = self._connect()  # a separate connection: joining blocks, and `release` must reach the store meanwhile
        with convert_group_errors(point.about):
            return build_group(
                store,
                key=key,
                rank=0,
                members=members,
                backend=backend,
                address=self._host,
                timeout_s=self._timeout_s,
            )

    def _stream(self, group: Group, source: Iterator[tuple[str, torch.Tensor]], about: str) -> dict[str, int]:
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        tensors = ((name, tensor) for name, tensor in source if tensor is not None)
        checksums: dict[str, int] = {}

        def still_on() -> None:
            if self._released.is_set():
                raise WeightSyncError(f"{about}: it was aborted while weights were sent.")

        for index, bucket in enumerate(plan_buckets(self._manifest, self._bucket_bytes)):
            if len(group.in_flight) == 2:
                group.finish_oldest(about, still_on)
            still_on()
            buffer = group.buffer(index, bucket.num_bytes, device)
            _pack(bucket, tensors, buffer, checksums, about)
            group.start(buffer, about)
        while group.in_flight:
            group.finish_oldest(about, still_on)
        surplus = next(tensors, None)
        if surplus is not None:
            self._names = ()
            raise WeightSyncError(f"{about}: the trainer has a new tensor '{surplus[0]}'; sync again.")
        return checksums


def _pack(
    bucket: Bucket,
    tensors: Iterator[tuple[str, torch.Tensor]],
    buffer: torch.Tensor,
    checksums: dict[str, int],
    about: str,
) -> None:
    """Fill a bucket with the next tensors, and store their checksums."""
    for slot in bucket.slots:
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None or spec_of(name, tensor) != slot.spec:
            found = "no tensor" if name is None or tensor is None else spec_of(name, tensor)
            raise WeightSyncError(f"{about}: the trainer announced {slot.spec} but sent {found}.")
        checksums[name] = tensor_checksum(tensor)
        buffer[slot.offset : slot.offset + slot.num_bytes].copy_(flat_bytes(tensor))
