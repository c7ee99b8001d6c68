"""Actors see the devices that Ray reserved for the run, and no others. Ray takes the number of devices on trust."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

import ray
from ray.util.placement_group import placement_group

from roll.cluster.ray_cluster import open_ray
from roll.cluster.ray_devices import list_reserved_devices
from roll.config.cluster import ClusterConfig, RoleDevices

pytestmark = pytest.mark.ray

SHOWN = ["3", "GPU-5b1c", "6", "7"]


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(SHOWN))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"include_dashboard": False, "configure_logging": False, "log_to_driver": False}
    ray.init("local", num_cpus=2, num_gpus=4, **quiet)
    yield
    ray.shutdown()


async def test_ray_devices_actors_see_what_was_reserved_beside_another_job(four_devices: None) -> None:
    other = placement_group([{"GPU": 1.0}])
    assert other.wait(60)
    taken = list_reserved_devices(other, 1, 1, 60)[0]
    assert len(taken) == 1 and set(taken) < set(SHOWN)
    left = [name for name in SHOWN if name not in taken]
    roles = {
        "actor_train": RoleDevices(kind="trainer", devices=[0, 2]),
        "actor_infer": RoleDevices(kind="engine", devices=[1, 2], tensor_parallel=2),
    }
    with mock.patch("roll.cluster.ray_cluster.count_accelerators", lambda: 4):
        cluster = open_ray(ClusterConfig(type="ray", devices_per_node=3), roles)
    assert cluster.choose_transport("vllm") == "broadcast"
    ask = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    seen = {
        role: [
            ray.get(ask.options(**cluster._build_options(seat, None, role, index)).remote(), timeout=60)
            for index, seat in enumerate(seats)
        ]
        for role, seats in cluster.placement.slots.items()
    }
    assert seen == {"actor_train": [left[0], left[2]], "actor_infer": [f"{left[1]},{left[2]}"]}
    await cluster.close()
