"""Transport `broadcast`, the engine's end: trainer rank 0 and all engines share a gloo or NCCL group.

Data flow, concurrently:

    sender packs bucket i + 1 ─► bucket i is sent to all engines ─► receivers check and apply bucket i - 1

Invariants: both ends derive the same buckets from the manifest and `bucket_bytes`; a receiver starts bucket i + 1 only
after the engine has consumed the last tensor of bucket i - 1, whose buffer is reused. `rendezvous` describes how the
processes find each other and form a group.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from roll.errors import WeightSyncError
from roll.types import WeightUpdate
from roll.weights.authenticated_store import AuthenticatedStore
from roll.weights.plan import Bucket, get_dtype, plan_buckets
from roll.weights.receiver import ReceiverLocation, TensorStream
from roll.weights.rendezvous import (
    BroadcastGroup,
    BroadcastMember,
    Rendezvous,
    build_group,
    convert_group_errors,
    find_local_address,
    get_device_name,
)

__all__ = ["BroadcastHandle", "build_engine_update", "receive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastHandle:
    """The data that an engine needs to join a broadcast."""

    host: str
    port: int
    """The port of the trainer's `StoreServer`."""
    secret: str = field(repr=False)
    """The secret of the `StoreServer`, with which a process can join."""
    sync: str
    """The prefix of this sync's keys in the store."""
    bucket_bytes: int
    engine_ids: tuple[str, ...] = ("engine",)
    """All participating engines, in rank order; set by the controller."""
    engine_id: str = "engine"
    """The engine that receives this copy of the handle; set by the controller."""


_groups: dict[tuple[str, int, BroadcastMember], BroadcastGroup] = {}
"""Cached process groups of this process, by the store's address and the member."""


def build_engine_update(update: WeightUpdate, engine_id: str, engine_ids: tuple[str, ...]) -> WeightUpdate:
    """Return the update for one engine. In a broadcast update, set the handle's `engine_id` and `engine_ids`."""
    if not isinstance(update.handle, BroadcastHandle):
        return update
    return replace(update, handle=replace(update.handle, engine_id=engine_id, engine_ids=engine_ids))


@contextmanager
def receive(update: WeightUpdate, location: ReceiverLocation) -> Generator[TensorStream]:
    """Join the broadcast's process group; yield the stream of received tensors."""
    handle: BroadcastHandle = update.handle
    member = BroadcastMember(handle.engine_id, location.worker)
    cache_key = (handle.host, handle.port, member)
    sync_name = f"weight sync of policy version {update.policy_version}, engine '{handle.engine_id}'"
    group, rendezvous = _join_rendezvous(handle, member, location, _groups.pop(cache_key, None), sync_name)
    try:
        yield _receive_tensors(update, group, location, rendezvous)
    except BaseException:
        group.abort()
        raise
    _groups[cache_key] = group  # only a group that worked is reused


def _join_rendezvous(
    handle: BroadcastHandle,
    member: BroadcastMember,
    location: ReceiverLocation,
    cached: BroadcastGroup | None,
    sync_name: str,
) -> tuple[BroadcastGroup, Rendezvous]:
    try:
        store = AuthenticatedStore(
            handle.host, handle.port, handle.secret, timeout=timedelta(seconds=location.timeout_s)
        )
    except dist.DistError as error:
        raise WeightSyncError(
            f"{sync_name}: cannot reach the trainer at {handle.host}:{handle.port}: check that the trainer is running."
        ) from error
    members = tuple(
        BroadcastMember(engine, worker) for engine in handle.engine_ids for worker in range(location.num_workers)
    )
    rank = 1 + members.index(member)
    rendezvous = Rendezvous(store, handle.sync, sync_name, location.timeout_s)
    rendezvous.write("members", members)
    # The sender reuses a group only if every member still has it cached.
    rendezvous.write(
        f"hello/{rank}", {"group": cached.key if cached else "", "device": get_device_name(location.device)}
    )
    verdict = rendezvous.read("verdict", "the trainer did not begin to send")
    rendezvous.check_verdict(verdict)
    if cached is not None and cached.key == verdict["group"]:
        return cached, rendezvous
    del cached  # closes its connections before new ones are made
    with convert_group_errors(sync_name):
        group = build_group(
            store,
            key=verdict["group"],
            rank=rank,
            members=members,
            backend=verdict["backend"],
            address=find_local_address(handle.host, handle.port),
            timeout_s=location.timeout_s,
        )
    return group, rendezvous


def _receive_tensors(
    update: WeightUpdate, group: BroadcastGroup, location: ReceiverLocation, rendezvous: Rendezvous
) -> TensorStream:
    sync_name = rendezvous.sync_name
    device = location.device if group.backend == "nccl" else torch.device("cpu")

    def start(index: int, bucket: Bucket) -> torch.Tensor:
        buffer = group.get_buffer(index, bucket.num_bytes, device)
        group.start(buffer, sync_name)
        return buffer

    buckets = plan_buckets(update.manifest, update.handle.bucket_bytes)
    started = [start(0, buckets[0])] if buckets else []
    for index, bucket in enumerate(buckets):
        # The next bucket is received while the engine reads this one.
        if index + 1 < len(buckets):
            started.append(start(index + 1, buckets[index + 1]))
        group.finish_oldest(sync_name, rendezvous.check_aborted)
        buffer = started.pop(0)
        for slot in bucket.slots:
            flat = buffer[slot.offset : slot.offset + slot.num_bytes].view(get_dtype(slot.spec))
            yield slot.spec.name, flat.reshape(slot.spec.shape)
