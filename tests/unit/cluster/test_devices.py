"""The device mapping, resolved to machines and their devices."""

from __future__ import annotations

from typing import Any

import pytest

from roll.cluster.devices import place
from roll.config import RLVRConfig
from roll.errors import PlacementError


def config(mapping: dict[str, Any], *, nodes: int = 1, tensor_parallel: int = 1) -> RLVRConfig:
    return RLVRConfig.model_validate(
        {
            "name": "x",
            "model": "m",
            "training": {"num_steps": 1},
            "data": [{"source": "arithmetic", "reward": "math"}],
            "inference": {"tensor_parallel": tensor_parallel},
            "cluster": {"type": "ray", "num_nodes": nodes, "device_mapping": mapping},
        }
    )


def test_disaggregated_roles_get_their_own_devices() -> None:
    placement = place(config({"actor_train": "0-1", "actor_infer": "2-3"}), devices_per_node=4)
    assert [seat.local_devices for seat in placement.trainer] == [(0,), (1,)]
    assert [seat.local_devices for seat in placement.engines] == [(2,), (3,)]
    assert placement.workers_on_first_node == 4


def test_global_numbers_become_machine_and_local_device() -> None:
    placement = place(config({"actor_train": "0-3", "actor_infer": "4-7"}, nodes=2, tensor_parallel=2), 4)
    assert [(s.node, s.local_devices) for s in placement.engines] == [(1, (0, 1)), (1, (2, 3))]


def test_a_device_beyond_the_cluster_is_refused_with_its_number() -> None:
    with pytest.raises(PlacementError, match=r"actor_infer names device 2, but 1 x 2 devices are numbered 0-1"):
        place(config({"actor_train": 0, "actor_infer": 2}), devices_per_node=2)


def test_an_engine_across_machines_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"\[1, 2\] of one engine lie on machines \[0, 1\]"):
        place(config({"actor_train": 0, "actor_infer": "1-2"}, nodes=2, tensor_parallel=2), 2)
