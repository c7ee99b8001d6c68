"""Transport `broadcast`, the engine's end: trainer rank 0 and all engines share a gloo or NCCL group.

Data flow, concurrently:

    sender packs bucket i + 1 ─► bucket i is sent to all engines ─► receivers check and apply bucket i - 1

Invariants: both ends derive the same buckets from the manifest and `bucket_bytes`; a receiver starts bucket i + 1 only
when the engine has consumed the last tensor of bucket i - 1, whose buffer is reused. `rendezvous` describes how the
processes meet.
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
from roll.weights.plan import Bucket, dtype_of, plan_buckets
from roll.weights.receiver import ReceiverLocation, TensorStream
from roll.weights.rendezvous import (
    Group,
    Member,
    Rendezvous,
    build_group,
    convert_group_errors,
    device_name,
    local_address,
)

__all__ = ["BroadcastHandle", "address_offer", "receive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastHandle:
    """The rendezvous of a broadcast."""

    host: str
    port: int
    """The port of the trainer's `StoreServer`."""
    secret: str = field(repr=False)
    """The secret that allows a process to join."""
    sync: str
    """The prefix of this sync's keys."""
    bucket_bytes: int
    engine_ids: tuple[str, ...] = ("engine",)
    """All participating engines, in the order of their ranks; the controller fills it in."""
    engine_id: str = "engine"
    """The engine that gets this copy of the handle."""


_groups: dict[tuple[str, int, Member], Group] = {}
"""This process's groups, by store and member."""


def address_offer(update: WeightUpdate, engine_id: str, engine_ids: tuple[str, ...]) -> WeightUpdate:
    """Return the offer for one engine: receivers of a broadcast must know each other, those of other transports need
    not.
    """
    if not isinstance(update.handle, BroadcastHandle):
        return update
    return replace(update, handle=replace(update.handle, engine_id=engine_id, engine_ids=engine_ids))


@contextmanager
def receive(update: WeightUpdate, place: ReceiverLocation) -> Generator[TensorStream]:
    """Join the other members, then receive bucket by bucket."""
    handle: BroadcastHandle = update.handle
    member = Member(handle.engine_id, place.worker)
    cache_key = (handle.host, handle.port, member)
    about = f"weight sync of policy version {update.policy_version}, engine {handle.engine_id}"
    group, point = _meet(handle, member, place, _groups.pop(cache_key, None), about)
    try:
        yield _tensors(update, group, place, point)
    except BaseException:
        group.abort()
        raise
    _groups[cache_key] = group  # only a group that worked is reused


def _meet(
    handle: BroadcastHandle, member: Member, place: ReceiverLocation, cached: Group | None, about: str
) -> tuple[Group, Rendezvous]:
    try:
        store = AuthenticatedStore(handle.host, handle.port, handle.secret, timeout=timedelta(seconds=place.timeout_s))
    except dist.DistError as error:
        raise WeightSyncError(
            f"{about}: no trainer answers at {handle.host}:{handle.port}: check whether it still runs."
        ) from error
    members = tuple(Member(engine, worker) for engine in handle.engine_ids for worker in range(place.num_workers))
    rank = 1 + members.index(member)
    point = Rendezvous(store, handle.sync, about, place.timeout_s)
    point.write("members", members)
    point.write(f"hello/{rank}", {"group": cached.key if cached else "", "device": device_name(place.device)})
    verdict = point.read("verdict", "the trainer did not begin to send")
    point.check_verdict(verdict)
    if cached is not None and cached.key == verdict["group"]:
        return cached, point
    del cached  # closes its connections before new ones are made
    with convert_group_errors(about):
        group = build_group(
            store,
            key=verdict["group"],
            rank=rank,
            members=members,
            backend=verdict["backend"],
            address=local_address(handle.host, handle.port),
            timeout_s=place.timeout_s,
        )
    return group, point


def _tensors(update: WeightUpdate, group: Group, place: ReceiverLocation, point: Rendezvous) -> TensorStream:
    about = point.about
    device = place.device if group.backend == "nccl" else torch.device("cpu")

    def ask(index: int, bucket: Bucket) -> torch.Tensor:
        buffer = group.buffer(index, bucket.num_bytes, device)
        group.start(buffer, about)
        return buffer

    buckets = plan_buckets(update.manifest, update.handle.bucket_bytes)
    asked = [ask(0, buckets[0])] if buckets else []
    for index, bucket in enumerate(buckets):
        if index + 1 < len(buckets):
            asked.append(ask(index + 1, buckets[index + 1]))
        group.finish_oldest(about, point.check_given_up)
        buffer = asked.pop(0)
        for slot in bucket.slots:
            flat = buffer[slot.offset : slot.offset + slot.num_bytes].view(dtype_of(slot.spec))
            yield slot.spec.name, flat.reshape(slot.spec.shape)
