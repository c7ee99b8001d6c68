"""The devices of each machine that are reserved for a run, by CUDA's names.

A placement slot's devices are counted within the reservation. They differ from the machine's first devices if another
job has those, or if `CUDA_VISIBLE_DEVICES` shows Ray only some devices, which may also be named by UUID.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["UNTOUCHED", "VISIBLE", "reserved_devices"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
UNTOUCHED = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Makes Ray leave `VISIBLE` unchanged in an actor's environment."""


def reserved_devices(group: PlacementGroup, num_nodes: int, per_node: int, timeout_s: float) -> list[list[str]]:
    """Return the names of each machine's devices in a placement group with a bundle of `per_node` GPUs per machine.

    It briefly occupies every bundle as a whole, so it must run before other actors are placed there.
    """
    ask: Any = ray.remote(_assigned)
    asked = [
        ask.options(
            num_cpus=0,
            num_gpus=per_node,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=node
            ),
            runtime_env={"env_vars": UNTOUCHED},
        ).remote()
        for node in range(num_nodes)
    ]
    return ray.get(asked, timeout=timeout_s)


def _assigned() -> list[str]:
    """Return the names of the devices that Ray assigned to this task, in the machine's visible order."""
    found = [str(name) for name in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    shown = os.environ.get(VISIBLE, "").split(",")
    return sorted(found, key=shown.index if set(found) <= set(shown) else int)
