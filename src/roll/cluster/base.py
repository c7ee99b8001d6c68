"""The interface between pipelines and machines: a cluster starts roles on devices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

from roll.config.cluster import ClusterConfig, RoleDevices
from roll.inference import EngineSpec
from roll.protocols import TrainerGroup, WorkerPool
from roll.registry import Registry
from roll.rollout.engine_group import EngineGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll.tracking import RunDirectory
    from roll.training import TrainerSpec

__all__ = ["CLUSTERS", "Cluster", "num_accelerators", "open_cluster", "start_together"]


class Cluster(Protocol):
    """Starts the roles of a run on its devices."""

    async def start_trainer(self, spec: TrainerSpec, role: str) -> TrainerGroup:
        """Start all ranks of a trainer on the role's devices.

        `spec` is that of a single rank 0, and is adapted to the actual ranks.
        """
        ...

    async def start_engines(self, specs: Sequence[EngineSpec], role: str) -> EngineGroup:
        """Start one engine per spec on the role's devices."""
        ...

    async def start_pool(self, num_workers: int) -> WorkerPool:
        """Start a worker pool for rewards."""
        ...

    def transport(self, engine_kind: str) -> str:
        """Return the fastest transport of weights from this cluster's trainer to its engines of this kind."""
        ...

    async def close(self) -> None:
        """Stop everything that this cluster started for itself; groups must be closed before."""
        ...


CLUSTERS: Registry[Callable[[ClusterConfig, Mapping[str, RoleDevices], RunDirectory | None], Cluster]] = Registry(
    "cluster", {"local": "roll.cluster.local:LocalCluster", "ray": "roll.cluster.ray_cluster:open_ray"}
)


def open_cluster(config: ClusterConfig, roles: Mapping[str, RoleDevices], run: RunDirectory | None = None) -> Cluster:
    """Open the cluster that the configuration describes.

    Args:
        config: The configuration of the machines.
        roles: The roles that can be started and their devices, by name.
        run: The run, whose directory gets the logs of the cluster's processes.

    Raises:
        PlacementError: the device mapping does not fit the available devices.
    """
    return CLUSTERS.get(config.type)(config, roles, run)


def num_accelerators() -> int:
    """Return the number of this machine's accelerators."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


async def start_together(stack: AsyncExitStack, *starting: Awaitable[Any]) -> list[Any]:
    """Start roles concurrently; `stack` closes all that started, in reverse order, also if this call is canceled.

    Returns:
        The roles, in the order given; `None` stays `None`.

    Raises:
        Exception: the error of the first failed role, after all have started or failed.
    """
    tasks = [asyncio.ensure_future(role) for role in starting]
    try:
        started = await asyncio.gather(*tasks, return_exceptions=True)
    finally:  # all tasks have ended, including canceled ones
        for task in tasks:
            if not task.cancelled() and task.exception() is None and (role := task.result()) is not None:
                stack.push_async_callback(role.close)
    failed = [role for role in started if isinstance(role, BaseException)]
    if failed:
        raise failed[0]
    return started
