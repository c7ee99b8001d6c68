"""The rendezvous of trainer rank 0 and the engines' processes for a `broadcast`, and their process group.

Data flow, per sync, through the trainer's store (`authenticated_store`; keys below the sync's own name):

    receiver ─ members, hello/<rank>: its cached group and device ─► sender
    sender   ─ verdict: the group to use, or that the sync is off  ─► receivers

Invariants:
    - Rank 0 is the trainer; the others follow the order of engines, then of an engine's processes.
    - A group is reused only if its members are those of this sync and all of them still hold it; one replaced engine
      means a new group for all. A member that gets an error drops its group, so a broken one is never reused.
    - Every wait has a timeout, and ends when the sender gives the sync up.
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
from roll.process_environment import temporary_environment

__all__ = [
    "Group",
    "Member",
    "Rendezvous",
    "build_group",
    "common_backend",
    "convert_group_errors",
    "device_name",
    "local_address",
]

POLL_S = 0.001

NCCL_POLL_S = 0.0001
"""Polling interval with NCCL; a bucket takes some hundred microseconds between devices of one machine."""

CHECK_INTERVAL_S = 0.5
"""Interval of checks whether the sender has given up, while waiting for its broadcast."""

_NCCL_CLEAN_UP_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
"""A failed NCCL group must not end its process."""


class Member(NamedTuple):
    """A receiving process: an engine and the number of its worker, from 0 on."""

    engine_id: str
    worker: int


@dataclass(kw_only=True, slots=True)
class Group:
    """A process group and the buffers of its broadcasts."""

    key: str
    members: tuple[Member, ...]
    """All members but the trainer, in the order of their ranks."""
    backend: str
    process_group: Any
    timeout: timedelta
    store: Any = None
    """A reference to the store, whose methods PyTorch calls."""
    in_flight: list[Any] = field(default_factory=list)
    """Running broadcasts, oldest first."""
    buffers: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0, dtype=torch.uint8)] * 2)

    def buffer(self, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return one of two alternating buffers: while one is in transfer, the other is filled or read."""
        if self.buffers[index % 2].numel() < num_bytes:
            self.buffers[index % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self.buffers[index % 2][:num_bytes]

    def start(self, buffer: torch.Tensor, about: str) -> None:
        """Start a broadcast from rank 0."""
        with convert_group_errors(about):
            self.in_flight.append(self.process_group.broadcast(buffer, root=0, timeout=self.timeout))

    def finish_oldest(self, about: str, still_on: Callable[[], None]) -> None:
        """Wait for the oldest broadcast.

        With NCCL, `wait` returns at once and the device waits, forever if a member is gone. So completion is polled
        here.

        Args:
            about: The name of the sync, for messages.
            still_on: A function called while waiting for NCCL; it raises to end the wait.
        """
        work = self.in_flight[0]
        if self.backend == "nccl":
            deadline = time.monotonic() + self.timeout.total_seconds()
            while not work.is_completed():
                still_on()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{about}: a broadcast did not end within {self.timeout.total_seconds():g} s."
                    )
                time.sleep(NCCL_POLL_S)
        with convert_group_errors(about):
            work.wait(self.timeout)
        del self.in_flight[0]

    def abort(self) -> None:
        """Abort running broadcasts. Other members notice by their closed connections, not by a timeout.

        gloo closes connections only when nothing refers to the group any more (its `abort` does nothing), and a
        traceback may hold our callers' variables. So the only references are those dropped here.
        """
        if self.backend == "nccl":
            self.process_group.abort()
        self.in_flight.clear()
        self.process_group = None


class Rendezvous:
    """One side's view of the store, for one sync.

    Args:
        store: A client of the trainer's store.
        sync: The unique name of the sync.
        about: The name of the sync in messages.
        timeout_s: The timeout of each wait.
    """

    def __init__(self, store: dist.Store, sync: str, about: str, timeout_s: float) -> None:
        self.about = about
        self._kept = store  # PyTorch calls its methods without keeping a reference
        self._store = dist.PrefixStore(sync, store)
        self._timeout_s = timeout_s
        self._last_check = time.monotonic()

    def write(self, key: str, value: Any) -> None:
        """Write plain data for the other members."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str, missing: str, still_on: Callable[[], None] = lambda: None) -> Any:
        """Wait for a value.

        Args:
            key: The key that another member writes.
            missing: A description of the missing event, for the timeout's message.
            still_on: A function called while waiting; it raises to end the wait.

        Raises:
            WeightSyncError: the value did not arrive in time, or the trainer's store is gone.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._store.check([key]):
                still_on()
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"{self.about}: {missing} within {self._timeout_s:g} s.")
                time.sleep(POLL_S)
            return json.loads(self._store.get(key))
        except dist.DistError as error:
            raise WeightSyncError(
                f"{self.about}: the connection to the trainer's store was lost: check whether the trainer still runs."
            ) from error

    def check_given_up(self) -> None:
        """Check whether the sender has given the sync up since its verdict; at most once every `CHECK_INTERVAL_S`.

        Raises:
            WeightSyncError: the sender gave up, or its store is gone.
        """
        if time.monotonic() < self._last_check + CHECK_INTERVAL_S:
            return
        self.check_verdict(self.read("verdict", "the trainer did not begin to send"))
        self._last_check = time.monotonic()

    def check_verdict(self, verdict: Mapping[str, str]) -> None:
        """Raise a `WeightSyncError` if the verdict is that the sync is off."""
        if "abandoned" in verdict:
            raise WeightSyncError(f"{self.about}: the trainer aborted the sync: {verdict['abandoned']}.")

    def forget(self, keys: Sequence[str]) -> None:
        """Delete values that are not read again."""
        for key in keys:
            self._store.delete_key(key)


@contextmanager
def convert_group_errors(about: str) -> Generator[None]:
    """Convert errors of a lost member or a timeout to a `WeightSyncError` that names the sync."""
    try:
        yield
    except RuntimeError as error:  # the base of all errors of torch.distributed
        cause = str(error).strip().partition("\n")[0]
        raise WeightSyncError(f"{about}: the trainer or an engine aborted the broadcast ({cause}).") from error


def device_name(device: torch.device) -> str:
    """Return `cpu`, or an identity of the accelerator that is unique across hosts."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.get_device_module(device).get_device_properties(device)
    unique = getattr(properties, "uuid", None) or f"{socket.gethostname()}/{device.index or 0}"
    return f"{device.type}:{unique}"


def common_backend(devices: Sequence[str]) -> str:
    """Return `nccl` if every member has its own GPU (NCCL does not support sharing one); else `gloo`, through the
    host.
    """
    on_gpu = all(name.startswith("cuda:") for name in devices)
    return "nccl" if on_gpu and len(set(devices)) == len(devices) else "gloo"


def local_address(host: str, port: int) -> str:
    """Return the address of the interface through which this process reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def build_group(
    store: dist.Store,
    *,
    key: str,
    rank: int,
    members: tuple[Member, ...],
    backend: str,
    address: str,
    timeout_s: float,
) -> Group:
    """Connect this process with all others that use the same key; block until all have joined.

    It does not use torch's default process group, which belongs to the trainer's ranks or to the engine.

    Raises:
        RuntimeError: a member did not join before the store's timeout.
    """
    size = 1 + len(members)
    timeout = timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore(f"group/{key}", store)
    if backend == "nccl":
        group = _nccl_group(prefixed, rank, size, timeout)
    else:
        options = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]  # absent from the stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        group = dist.ProcessGroupGloo(prefixed, rank, size, options)
    return Group(key=key, members=members, backend=backend, process_group=group, timeout=timeout, store=store)


def _nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Build a group whose failure ends no process: trainer and engines survive a failed sync and build a new group.

    By default a watchdog ends the process of every member that waits for a lost one. PyTorch reads the variable when a
    group is created. `Group.finish_oldest` enforces the timeout; the watchdog aborts broadcasts that no code waits for.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout
    with temporary_environment(_NCCL_CLEAN_UP_ONLY):
        return dist.ProcessGroupNCCL(store, rank, size, options)
