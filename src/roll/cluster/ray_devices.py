"""CUDA names (indices or UUIDs) of the devices that are reserved for a run, by machine.

The device indices of a placement slot refer to the reserved devices. These are not the first devices of the machine if
another job uses those, or if `CUDA_VISIBLE_DEVICES` hides some devices from Ray.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["CUDA_VISIBLE_DEVICES", "KEEP_CUDA_VISIBLE_DEVICES", "list_reserved_devices"]

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
KEEP_CUDA_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Makes Ray leave `CUDA_VISIBLE_DEVICES` unchanged in an actor's environment."""


def list_reserved_devices(group: PlacementGroup, num_nodes: int, per_node: int, timeout_s: float) -> list[list[str]]:
    """Return the device names of each machine in a placement group that has one bundle of `per_node` GPUs per machine.

    A short task uses all GPUs of each bundle, so call this function before actors are placed in the bundles.
    """
    ask: Any = ray.remote(_list_assigned_devices)
    asked = [
        ask.options(
            num_cpus=0,
            num_gpus=per_node,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=node
            ),
            runtime_env={"env_vars": KEEP_CUDA_VISIBLE_DEVICES},
        ).remote()
        for node in range(num_nodes)
    ]
    return ray.get(asked, timeout=timeout_s)


def _list_assigned_devices() -> list[str]:
    """Return the names of the devices that Ray assigned to this task, in the order of the machine's visible devices."""
    assigned = [str(name) for name in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    visible = os.environ.get(CUDA_VISIBLE_DEVICES, "").split(",")
    # Names may be UUIDs, whose order has no meaning.
    return sorted(assigned, key=visible.index if set(assigned) <= set(visible) else int)
