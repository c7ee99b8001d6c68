"""The nodes of a Ray cluster that a run did not reserve, and engines on them.

Nodes join with `ray start --address=…`. Ray announces that a node leaves by draining it (`ray drain-node`, or the
autoscaler before a preemption); actors on the node continue until the node is shut down. A node that leaves without
notice is only missing from the list of live nodes, after Ray's health check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.cluster.ray_engines import RayEngine
from roll.config.cluster import ElasticConfig
from roll.errors import InfraError
from roll.inference import EngineSpec
from roll.rollout.elastic import ElasticNode

__all__ = ["RayNodes", "build_label_selector"]

SPOT_LABEL = "ray.io/market-type=spot"
"""Ray's own label of preemptible nodes."""


def build_label_selector(config: ElasticConfig) -> dict[str, str]:
    """Return the label selector for the nodes that the run reserves: nodes without the label of elastic nodes."""
    key, _, value = (config.node_label or SPOT_LABEL).partition("=")
    return {key: f"!{value}"}


class RayNodes:
    """Implements `ElasticNodes` with the nodes outside the run's placement group.

    Args:
        spec: Describes every engine, except for its id and its log.
        config: The configuration of elastic engines.
        group: The run's placement group.
        has_accelerators: Whether the devices are GPUs; otherwise they are CPU worker slots.
        max_devices_per_node: The number of devices to use of a node; `None` for all.
        build_environment: Returns the environment variables of an engine's process, given its number of threads and the
            engine's number.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: ElasticConfig,
        group: PlacementGroup,
        *,
        has_accelerators: bool,
        max_devices_per_node: int | None,
        build_environment: Callable[[int | None, int], dict[str, str]],
    ) -> None:
        self._spec = spec
        self._label = config.node_label
        self._own_ids = set(placement_group_table(group)["bundles_to_node_id"].values())
        self._kind = "GPU" if has_accelerators else "CPU"
        self._max_devices = max_devices_per_node
        self._build_environment = build_environment
        self._num_threads: dict[str, int] = {}
        """Number of CPU threads of an engine on a node without accelerators, by node."""

    async def list_nodes(self) -> Sequence[ElasticNode]:
        """See `ElasticNodes.list_nodes`."""
        return await asyncio.to_thread(self._list_nodes)

    def _list_nodes(self) -> list[ElasticNode]:
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            draining, free = state.get_draining_nodes(), available_resources_per_node()
        except Exception as error:  # Ray raises many types when its head does not answer
            raise InfraError(f"the head of the Ray cluster does not respond: {error}") from error
        return [
            self._describe(node, draining.get(node["NodeID"]), free.get(node["NodeID"], {}))
            for node in nodes
            if node["NodeID"] not in self._own_ids and self._has_label(node["Labels"])
        ]

    def _has_label(self, labels: dict[str, str]) -> bool:
        key, _, value = (self._label or "").partition("=")
        return not key or labels.get(key) == value

    def _describe(self, node: dict[str, Any], deadline_ms: int | None, free: dict[str, float]) -> ElasticNode:
        """Convert Ray's description of a node.

        Args:
            node: Ray's description of the node.
            deadline_ms: The Unix time at which a draining node is shut down; 0 if the time is unknown, `None` if the
                node is not draining.
            free: The free resources of the node.
        """
        width, total = self._spec.tensor_parallel, int(node["Resources"].get(self._kind, 0))
        capacity = min(total, self._max_devices or total) // width
        if self._kind == "CPU" and capacity:
            self._num_threads[node["NodeID"]] = max(1, total // capacity)
        return ElasticNode(
            node_id=node["NodeID"],
            capacity=capacity,
            num_free=int(free.get(self._kind, 0)) // width,
            is_draining=deadline_ms is not None,
            seconds_left=max(0.0, deadline_ms / 1000 - time.time()) if deadline_ms else None,
            address=node["NodeManagerAddress"],
        )

    def build_engine(self, engine_id: str, node_id: str) -> RayEngine:
        """See `ElasticNodes.build_engine`."""
        number = int(engine_id.rpartition("-")[2])
        threads = self._spec.num_threads or self._num_threads.get(node_id)
        log = self._spec.log_path
        spec = replace(
            self._spec,
            engine_id=engine_id,
            num_threads=threads,
            log_path=None if log is None else log.with_name(f"engine-{number}{log.suffix}"),
        )
        width = float(spec.tensor_parallel)
        options = {
            "num_cpus": width if self._kind == "CPU" else 0,
            "num_gpus": width if self._kind == "GPU" else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            "runtime_env": {"env_vars": self._build_environment(threads, number)},
        }
        return RayEngine(spec, options)
