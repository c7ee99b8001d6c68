"""What a broadcast group does where NCCL, which keeps no time and tells nobody of a member's end, carries it."""

from __future__ import annotations

import os
import types
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.errors import WeightSyncError
from roll.weights import rendezvous
from roll.weights.rendezvous import BroadcastGroup, Rendezvous, build_group, choose_backend, get_device_name

VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Work:
    """A broadcast on a device: done after some looks, or never. `wait` lets the device wait, and returns at once."""

    def __init__(self, looks: float) -> None:
        self.looks = looks
        self.waited = False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: timedelta) -> None:
        self.waited = True


def group_with(*works: Work, timeout_s: float = 60.0) -> BroadcastGroup:
    timeout = timedelta(seconds=timeout_s)
    return BroadcastGroup(
        key="k", members=(), backend="nccl", process_group=None, timeout=timeout, in_flight=list(works)
    )


def test_nccl_group_the_oldest_broadcast_is_waited_for_until_the_device_is_through() -> None:
    first, second = Work(3), Work(0)
    group = group_with(first, second)
    group.finish_oldest("sync 1", lambda: None)
    assert (first.looks, first.waited) == (-1, True)
    assert group.in_flight == [second] and not second.waited


def test_nccl_group_a_member_that_is_gone_costs_no_more_than_the_time_limit() -> None:
    work = Work(float("inf"))
    with pytest.raises(WeightSyncError, match=r"sync 1: a broadcast did not end within 0\.01 s"):
        group_with(work, timeout_s=0.01).finish_oldest("sync 1", lambda: None)
    assert not work.waited


def test_nccl_group_a_sync_that_is_given_up_is_not_waited_for() -> None:
    def off() -> None:
        raise WeightSyncError("it was given up")

    with pytest.raises(WeightSyncError, match=r"^it was given up$"):
        group_with(Work(float("inf"))).finish_oldest("sync 1", off)


def test_nccl_group_a_receiver_hears_that_the_sender_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Rendezvous(dist.HashStore(), "sync/0", "sync 1", 1.0)
    point.write("verdict", {"group": "k", "backend": "nccl"})
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL_S", 0.0)
    point.check_aborted()
    point.write("verdict", {"abandoned": "another engine failed, or the sender did"})
    with pytest.raises(WeightSyncError, match="sync 1: the trainer aborted the sync: another engine failed"):
        point.check_aborted()
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL_S", 3600.0)
    point.check_aborted()  # it looks now and then only


@pytest.mark.parametrize("before", [None, "3"])
def test_nccl_group_a_failed_broadcast_ends_no_process(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """PyTorch would end every process whose peer is gone, and reads what to do when a group is made."""
    seen: list[Any] = []

    class Nccl:
        Options = types.SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.append((os.environ[VARIABLE], rank, size, options._timeout))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    group = build_group(
        dist.HashStore(), key="k", rank=1, members=(), backend="nccl", address="127.0.0.1", timeout_s=30.0
    )
    assert seen == [("2", 1, 1, timedelta(seconds=60))]  # 2: clean up only; the group's own limit comes first
    assert group.timeout == timedelta(seconds=30)
    assert os.environ.get(VARIABLE) == before


def test_nccl_group_devices_are_named_by_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cuda": types.SimpleNamespace(uuid="0a1b"), "xpu": types.SimpleNamespace()}
    module = lambda device: types.SimpleNamespace(get_device_properties=lambda _: found[device.type])  # noqa: E731
    monkeypatch.setattr(torch, "get_device_module", module)
    assert get_device_name(torch.device("cpu")) == "cpu"
    assert get_device_name(torch.device("cuda", 1)) == "cuda:0a1b"
    first, second = (get_device_name(torch.device("xpu", index)) for index in range(2))
    assert first != second
    assert choose_backend([first, second]) == "gloo"
    assert choose_backend(["cuda:0a1b", "cuda:0c2d"]) == "nccl"
    assert choose_backend(["cuda:0a1b", "cuda:0a1b"]) == "gloo"
