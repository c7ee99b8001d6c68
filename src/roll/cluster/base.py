"""The interface `Cluster`, with which pipelines start the roles of a run on devices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from roll.config.cluster import ClusterConfig, RoleDevices
from roll.inference import EngineSpec
from roll.protocols import TrainerGroup, WorkerPool
from roll.registry import Registry
from roll.rollout.elastic_engines import ElasticNodes
from roll.rollout.engine_group import EngineGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll.tracking import RunDirectory
    from roll.training import TrainerSpec

__all__ = ["CLUSTERS", "Cluster", "count_accelerators", "open_cluster", "set_media_dir", "start_concurrently"]

S = TypeVar("S", "TrainerSpec", EngineSpec)


class Cluster(Protocol):
    """Starts the roles of a run on its devices."""

    media_dir: Path | None
    """The media store from which trainers and engines read images; by default the run's media store."""

    async def start_trainer(self, spec: TrainerSpec, role: str) -> TrainerGroup:
        """Start all ranks of a trainer on the role's devices.

        `spec` describes rank 0 of a single-rank trainer; the cluster sets rank and world size for each actual rank.
        """
        ...

    async def start_engines(
        self, specs: Sequence[EngineSpec], role: str, asleep: Sequence[Collection[str]] = ()
    ) -> EngineGroup:
        """Start one engine per spec on the role's devices.

        Args:
            specs: The specs, in the order of the role's placement slots.
            role: The role.
            asleep: Ids of engines that use the devices of other engines in turns. Each collection starts, then sleeps,
                before the next one starts; engines in no collection start last, and stay awake.
        """
        ...

    def open_elastic_nodes(self, spec: EngineSpec, role: str) -> ElasticNodes | None:
        """Return the nodes that join and leave during the run, for additional engines of a role.

        Args:
            spec: Describes every engine on these nodes, except for its id and its log.
            role: The role of the engines.

        Returns:
            The nodes; `None` if the run uses none.
        """
        ...

    async def start_pool(self, num_workers: int) -> WorkerPool:
        """Start a worker pool for rewards."""
        ...

    def choose_transport(self, engine_kind: str) -> str:
        """Return the name of the fastest weight transport from trainers to engines of this type on this cluster."""
        ...

    async def close(self) -> None:
        """Stop the processes of the cluster itself; trainers, engines and pools must already be closed."""
        ...


CLUSTERS: Registry[Callable[[ClusterConfig, Mapping[str, RoleDevices], RunDirectory | None], Cluster]] = Registry(
    "cluster", {"local": "roll.cluster.local:LocalCluster", "ray": "roll.cluster.ray_cluster:open_ray"}
)


def open_cluster(config: ClusterConfig, roles: Mapping[str, RoleDevices], run: RunDirectory | None = None) -> Cluster:
    """Open the cluster that the configuration describes.

    Args:
        config: The configuration of the machines.
        roles: The devices of each role that can be started, by the role's name.
        run: The run, whose directory gets the logs of the cluster's processes.

    Raises:
        PlacementError: the device mapping does not fit the available devices.
    """
    return CLUSTERS.get(config.type)(config, roles, run)


def set_media_dir(spec: S, directory: Path | None) -> S:
    """Return a copy of a spec with the directory of the media store; for `None`, return the spec unchanged."""
    return spec if directory is None else replace(spec, media_dir=directory)


def count_accelerators() -> int:
    """Return the number of this machine's accelerators."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


async def start_concurrently(stack: AsyncExitStack, *awaitables: Awaitable[Any]) -> list[Any]:
    """Start roles concurrently; `stack` closes the started roles in reverse order, even if this call is canceled.

    Returns:
        The started roles in argument order; `None` for an awaitable that returned `None`.

    Raises:
        Exception: the error of the first failed role, after all have started or failed.
    """
    tasks = [asyncio.ensure_future(role) for role in awaitables]
    try:
        started = await asyncio.gather(*tasks, return_exceptions=True)
    finally:  # all tasks have ended, including canceled ones
        for task in tasks:
            if not task.cancelled() and task.exception() is None and (role := task.result()) is not None:
                stack.push_async_callback(role.close)
    # Raised only now, when no role is still starting: the processes of such a role would not be closed.
    failed = [role for role in started if isinstance(role, BaseException)]
    if failed:
        raise failed[0]
    return started
