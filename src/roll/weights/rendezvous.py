"""The rendezvous of trainer rank 0 and the engines' processes for a `broadcast`, and their process group.

Data flow, per sync, through the trainer's store (`authenticated_store`; keys are prefixed with the sync's name):

    receiver ─ members, hello/<rank>: its cached group and device ──► sender
    sender   ─ verdict: the group to use, or that the sync is aborted ─► receivers

Invariants:
    - Rank 0 is the trainer; the other ranks are ordered by engine, then by an engine's processes.
    - A group is reused only if its members are the members of this sync and all of them still have it; if one engine
      is replaced, all members build a new group. A member that gets an error drops its group, so a broken group is
      never reused.
    - Every wait has a timeout, and ends when the sender aborts the sync.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from roll.errors import WeightSyncError
from roll.process_environment import override_environment

__all__ = [
    "BroadcastGroup",
    "BroadcastMember",
    "Rendezvous",
    "build_group",
    "choose_backend",
    "convert_group_errors",
    "find_local_address",
    "get_device_name",
]

POLL_INTERVAL_S = 0.001

NCCL_POLL_INTERVAL_S = 0.0001
"""Polling interval with NCCL; between devices of one machine, a bucket takes a few hundred microseconds."""

CHECK_INTERVAL_S = 0.5
"""Interval at which a receiver checks whether the sender has aborted the sync, while it waits for a broadcast."""

_NCCL_CLEAN_UP_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
"""Environment variable that keeps NCCL's watchdog from ending the process of a failed group."""


class BroadcastMember(NamedTuple):
    """A receiving process: its engine, and its index among the engine's workers."""

    engine_id: str
    worker: int


@dataclass(kw_only=True, slots=True)
class BroadcastGroup:
    """A process group and the buffers of its broadcasts."""

    key: str
    members: tuple[BroadcastMember, ...]
    """All members except the trainer, in rank order."""
    backend: str
    process_group: Any
    timeout: timedelta
    store: Any = None
    """The store, referenced here because PyTorch calls it without holding a reference."""
    in_flight: list[Any] = field(default_factory=list)
    """Running broadcasts, oldest first."""
    buffers: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0, dtype=torch.uint8)] * 2)

    def get_buffer(self, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return `num_bytes` of the buffer of bucket `index`.

        Buckets alternate between two buffers: one is filled or read while the other is in transfer.
        """
        if self.buffers[index % 2].numel() < num_bytes:
            self.buffers[index % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self.buffers[index % 2][:num_bytes]

    def start(self, buffer: torch.Tensor, sync_name: str) -> None:
        """Start a broadcast from rank 0."""
        with convert_group_errors(sync_name):
            self.in_flight.append(self.process_group.broadcast(buffer, root=0, timeout=self.timeout))

    def finish_oldest(self, sync_name: str, check_active: Callable[[], None]) -> None:
        """Wait until the oldest running broadcast has completed.

        With NCCL, `wait` returns at once, and the device waits forever if a member has died. Completion is therefore
        polled.

        Args:
            sync_name: The name of the sync, for messages.
            check_active: A function called repeatedly while waiting for NCCL; it raises an error to end the wait.
        """
        work = self.in_flight[0]
        if self.backend == "nccl":
            deadline = time.monotonic() + self.timeout.total_seconds()
            while not work.is_completed():
                check_active()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{sync_name}: a broadcast did not end within {self.timeout.total_seconds():g} s."
                    )
                time.sleep(NCCL_POLL_INTERVAL_S)
        with convert_group_errors(sync_name):
            work.wait(self.timeout)
        del self.in_flight[0]

    def abort(self) -> None:
        """Abort running broadcasts. Other members get an error at once, because their connections are closed.

        gloo's `abort` does nothing: gloo closes connections only when the last reference to the group is deleted. A
        traceback may keep callers' variables alive, so only this object stores references, and this method deletes
        them.
        """
        if self.backend == "nccl":
            self.process_group.abort()
        self.in_flight.clear()
        self.process_group = None


class Rendezvous:
    """Exchanges data with the other members of one sync through the trainer's store.

    Args:
        store: A client of the trainer's store.
        sync: The unique name of the sync, which prefixes all keys.
        sync_name: The name of the sync in messages.
        timeout_s: The timeout of each wait, in seconds.
    """

    def __init__(self, store: dist.Store, sync: str, sync_name: str, timeout_s: float) -> None:
        self.sync_name = sync_name
        self._kept = store  # PyTorch calls its methods without keeping a reference
        self._store = dist.PrefixStore(sync, store)
        self._timeout_s = timeout_s
        self._last_check = time.monotonic()

    def write(self, key: str, value: Any) -> None:
        """Write a JSON value for the other members."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str, missing: str, check_active: Callable[[], None] = lambda: None) -> Any:
        """Wait for a value that another member writes, and return it.

        Args:
            key: The key.
            missing: Description of the missing event, for the timeout message "{missing} within 60 s".
            check_active: A function called repeatedly while waiting; it raises an error to end the wait.

        Raises:
            WeightSyncError: the value was not written in time, or the connection to the store was lost.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._store.check([key]):
                check_active()
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"{self.sync_name}: {missing} within {self._timeout_s:g} s.")
                time.sleep(POLL_INTERVAL_S)
            return json.loads(self._store.get(key))
        except dist.DistError as error:
            raise WeightSyncError(
                f"{self.sync_name}: the connection to the trainer's store was lost: check that the trainer is running."
            ) from error

    def check_aborted(self) -> None:
        """Check whether the sender has aborted the sync; calls within `CHECK_INTERVAL_S` of the last check do nothing.

        Raises:
            WeightSyncError: the sender has aborted the sync, or the connection to its store was lost.
        """
        if time.monotonic() < self._last_check + CHECK_INTERVAL_S:
            return
        self.check_verdict(self.read("verdict", "the trainer did not begin to send"))
        self._last_check = time.monotonic()

    def check_verdict(self, verdict: Mapping[str, str]) -> None:
        """Raise a `WeightSyncError` if the verdict shows that the sender has aborted the sync."""
        if "abandoned" in verdict:
            raise WeightSyncError(f"{self.sync_name}: the trainer aborted the sync: {verdict['abandoned']}.")

    def delete_values(self, keys: Sequence[str]) -> None:
        """Delete values that no member needs any more."""
        for key in keys:
            self._store.delete_key(key)


@contextmanager
def convert_group_errors(sync_name: str) -> Generator[None]:
    """Convert torch.distributed errors in a `with` block to a `WeightSyncError` with the name of the sync."""
    try:
        yield
    except RuntimeError as error:  # the base of all errors of torch.distributed
        cause = str(error).strip().partition("\n")[0]
        raise WeightSyncError(f"{sync_name}: the trainer or an engine aborted the broadcast ({cause}).") from error


def get_device_name(device: torch.device) -> str:
    """Return `cpu`, or a name of the accelerator that is unique across hosts."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.get_device_module(device).get_device_properties(device)
    unique = getattr(properties, "uuid", None) or f"{socket.gethostname()}/{device.index or 0}"
    return f"{device.type}:{unique}"


def choose_backend(devices: Sequence[str]) -> str:
    """Return `nccl` if every member has its own GPU, else `gloo`: with NCCL, members cannot share a GPU."""
    on_gpu = all(name.startswith("cuda:") for name in devices)
    return "nccl" if on_gpu and len(set(devices)) == len(devices) else "gloo"


def find_local_address(host: str, port: int) -> str:
    """Return the local address from which this process reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing; the kernel only chooses the interface.
        probe.connect((host, port))
        return probe.getsockname()[0]


def build_group(
    store: dist.Store,
    *,
    key: str,
    rank: int,
    members: tuple[BroadcastMember, ...],
    backend: str,
    address: str,
    timeout_s: float,
) -> BroadcastGroup:
    """Build a process group with all processes that use the same key; block until all have joined.

    The group is separate from torch's default process group, which the trainer's ranks or the engine use.

    Raises:
        RuntimeError: a member did not join before the store's timeout.
    """
    size = 1 + len(members)
    timeout = timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore(f"group/{key}", store)
    if backend == "nccl":
        group = _build_nccl_group(prefixed, rank, size, timeout)
    else:
        options = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]  # absent from the stubs
        # By default gloo uses the address of the host name, which other hosts may not be able to reach.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        group = dist.ProcessGroupGloo(prefixed, rank, size, options)
    return BroadcastGroup(key=key, members=members, backend=backend, process_group=group, timeout=timeout, store=store)


def _build_nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Build an NCCL group whose failure does not end any process, so that trainer and engines can build a new group.

    By default, a watchdog ends the process of every member that waits for a lost member. An environment variable, which
    PyTorch reads when a group is created, prevents this. `BroadcastGroup.finish_oldest` enforces the timeout instead.
    The watchdog only aborts broadcasts that no code waits for.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout
    with override_environment(_NCCL_CLEAN_UP_ONLY):
        return dist.ProcessGroupNCCL(store, rank, size, options)
