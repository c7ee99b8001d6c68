"""The seam between pipelines and machines: what starts roles, and where."""

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

        `spec` is that of rank 0 of one, and is adapted to the ranks there are.
        """
        ...

    async def start_engines(self, specs: Sequence[EngineSpec], role: str) -> EngineGroup:
        """Start one engine per spec, on the role's devices."""
        ...

    async def start_pool(self, num_workers: int) -> WorkerPool:
        """Start workers for rewards."""
        ...

    def transport(self, engine_kind: str) -> str:
        """The fastest way for weights from this cluster's trainer to its engines of this kind."""
        ...

    async def close(self) -> None:
        """End what this cluster started for itself; groups are closed before."""
        ...


CLUSTERS: Registry[Callable[[ClusterConfig, Mapping[str, RoleDevices], RunDirectory | None], Cluster]] = Registry(
    "cluster", {"local": "roll.cluster.local:LocalCluster", "ray": "roll.cluster.ray_cluster:open_ray"}
)


def open_cluster(config: ClusterConfig, roles: Mapping[str, RoleDevices], run: RunDirectory | None = None) -> Cluster:
    """The cluster that the configuration asks for.

    Args:
        config: the machines.
        roles: by name: what can be started, and where.
        run: its processes log into its directory.

    Raises:
        PlacementError: the device mapping does not fit the devices there are.
    """
    return CLUSTERS.get(config.type)(config, roles, run)


def num_accelerators() -> int:
    """Devices of this machine that are no CPU."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


async def start_together(stack: AsyncExitStack, *starting: Awaitable[Any]) -> list[Any]:
    """Start roles at the same time; `stack` closes whatever started, the last one first, also when this is cancelled.

    Returns:
        The roles, in the order given; `None` stays `None`.

    Raises:
        Exception: what the first of them raised that failed, after all have started or failed.
    """
    tasks = [asyncio.ensure_future(role) for role in starting]
    try:
        started = await asyncio.gather(*tasks, return_exceptions=True)
    finally:  # all of them have ended, also those that were cancelled
        for task in tasks:
            if not task.cancelled() and task.exception() is None and (role := task.result()) is not None:
                stack.push_async_callback(role.close)
    failed = [role for role in started if isinstance(role, BaseException)]
    if failed:
        raise failed[0]
    return started
