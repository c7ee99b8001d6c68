"""The device mapping, resolved to machines and their devices."""

from __future__ import annotations

from typing import Any

import pytest

from roll.cluster.devices import Placement, list_accelerator_types, resolve_placement
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import PlacementError


def config(
    mapping: dict[str, Any], *, nodes: int = 1, tensor_parallel: int = 1, kind: str = "ray", **changes: Any
) -> RLVRConfig:
    return RLVRConfig.model_validate(
        {
            "name": "x",
            "model": "m",
            "training": {"num_steps": 1},
            "data": [{"source": "arithmetic", "reward": "math"}],
            "inference": {"tensor_parallel": tensor_parallel},
            "cluster": {"type": kind, "num_nodes": nodes, "device_mapping": mapping},
            **changes,
        }
    )


def place(config: RLVRConfig, devices_per_node: int) -> Placement:
    return resolve_placement(config.cluster, config.roles, devices_per_node)


def test_device_mapping_disaggregated_roles_get_their_own_devices() -> None:
    placement = place(config({"actor_train": "0-1", "actor_infer": "2-3"}), devices_per_node=4)
    assert [seat.local_devices for seat in placement.slots["actor_train"]] == [(0,), (1,)]
    assert [seat.local_devices for seat in placement.slots["actor_infer"]] == [(2,), (3,)]
    assert placement.num_workers_on_first_node == 4


def test_device_mapping_critics_and_the_reference_share_the_trainers_devices_unless_they_are_named() -> None:
    both = {"type": "ppo", "kl": {"coefficient": 0.1}}
    shared = place(config({"actor_train": "0-1", "actor_infer": 2}, algorithm=both), devices_per_node=8).slots
    assert shared["critic"] == shared["reference"] == shared["actor_train"]
    mapping = {"actor_train": "0-1", "actor_infer": 2, "critic": "3-5", "reference": 6}
    apart = place(config(mapping, algorithm=both), devices_per_node=8)
    assert [seat.local_devices for seat in apart.slots["critic"]] == [(3,), (4,), (5,)]
    assert [seat.local_devices for seat in apart.slots["reference"]] == [(6,)]
    assert apart.slots["actor_train"] == shared["actor_train"]


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_device_mapping_devices_of_a_role_that_the_run_does_not_have_are_refused(role: str) -> None:
    with pytest.raises(ValueError, match=f"device_mapping.{role} is set, but no {role} is used"):
        config({"actor_train": 0, "actor_infer": 1, role: 2})


def test_device_mapping_devices_for_a_reference_that_is_the_policy_without_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="the reference is the policy without its adapters"):
        config(
            {"reference": 1},
            algorithm={"kl": {"coefficient": 0.1}},
            model={"path": "m", "lora": {"rank": 2}},
        )


def test_device_mapping_devices_for_a_reference_that_the_trainer_keeps_are_refused() -> None:
    with pytest.raises(ValueError, match="the reference is in the policy's trainer"):
        config({"reference": 1}, algorithm={"kl": {"coefficient": 0.1, "estimator": "full"}})


def test_device_mapping_a_local_run_has_one_rank_of_every_role() -> None:
    with pytest.raises(ValueError, match=r"device_mapping\.critic maps devices \[0, 1\]"):
        config({"critic": "0-1"}, kind="local", algorithm={"type": "ppo"})


def test_device_mapping_global_numbers_become_machine_and_local_device() -> None:
    placement = place(config({"actor_train": "0-3", "actor_infer": "4-7"}, nodes=2, tensor_parallel=2), 4)
    assert [(s.node, s.local_devices) for s in placement.slots["actor_infer"]] == [(1, (0, 1)), (1, (2, 3))]


def test_device_mapping_a_device_beyond_the_cluster_is_refused_with_its_number() -> None:
    with pytest.raises(PlacementError, match=r"actor_infer contains device 2, but 1 x 2 devices are numbered 0-1"):
        place(config({"actor_train": 0, "actor_infer": 2}), devices_per_node=2)


def test_device_mapping_an_engine_across_machines_is_refused() -> None:
    with pytest.raises(
        PlacementError, match=r"must not span machines, but its devices \[1, 2\] are on machines \[0, 1\]"
    ):
        place(config({"actor_train": 0, "actor_infer": "1-2"}, nodes=2, tensor_parallel=2), 2)


def classed(*classes: tuple[str, str, str | None], nodes: int = 2) -> RLVRConfig:
    """Configuration with device classes, each a name, devices and an accelerator type."""
    entries = {name: {"devices": devices, "accelerator_type": kind} for name, devices, kind in classes}
    mapping = {"actor_train": "0-7", "actor_infer": "8-15"}
    cluster = {"type": "ray", "num_nodes": nodes, "device_mapping": mapping, "device_classes": entries}
    return config({}, cluster=cluster)


def test_device_mapping_machines_must_have_the_accelerators_of_their_classes() -> None:
    both = classed(("h800", "0-7", "H800"), ("h20", "8-15", "H20"))
    assert list_accelerator_types(both.cluster, devices_per_node=8) == ["H800", "H20"]
    one = classed(("h800", "0-7", None), ("h20", "8-15", "H20"), nodes=3)
    assert list_accelerator_types(one.cluster, devices_per_node=8) == [None, "H20", None]


def test_device_mapping_classes_with_different_accelerators_on_one_machine_are_rejected() -> None:
    mixed = classed(("h800", "0-3", "H800"), ("h20", "4-15", "H20"))
    with pytest.raises(PlacementError, match=r"machine 0 \(devices 0-7\) has devices of the classes h800 and h20 with"):
        list_accelerator_types(mixed.cluster, devices_per_node=8)
