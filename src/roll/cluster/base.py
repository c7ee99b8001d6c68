"""The seam between pipelines and machines: what starts roles, and where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

from roll.config.pipelines.rlvr import RLVRConfig
from roll.inference import EngineSpec
from roll.protocols import EngineGroup, TrainerGroup, WorkerPool
from roll.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll.tracking import RunDirectory
    from roll.training import TrainerSpec

__all__ = ["CLUSTERS", "Cluster", "open_cluster", "start_together"]


class Cluster(Protocol):
    """Starts the roles of a run on its devices."""

    async def start_trainer(self, spec: TrainerSpec) -> TrainerGroup:
        """Start all ranks of a trainer, in any role, on the role's devices.

        `spec` is that of rank 0 of one, and is adapted to the ranks there are.
        """
        ...

    async def start_engines(self, specs: Sequence[EngineSpec], role: str = "actor_infer") -> EngineGroup:
        """Start one engine per spec, on the devices of the role: the policy's engines, or the `judge`'s."""
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


CLUSTERS: Registry[Callable[[RLVRConfig, RunDirectory | None], Cluster]] = Registry(
    "cluster", {"local": "roll.cluster.local:open_local", "ray": "roll.cluster.ray_cluster:open_ray"}
)


def open_cluster(config: RLVRConfig, run: RunDirectory | None = None) -> Cluster:
    """The cluster that the configuration asks for; its processes log into the run's directory.

    Raises:
        PlacementError: the device mapping does not fit the devices there are.
    """
    return CLUSTERS.get(config.cluster.type)(config, run)


async def start_together(stack: AsyncExitStack, *starting: Awaitable[Any]) -> list[Any]:
    """Start roles at the same time; `stack` closes whatever started, the last one first.

    Returns:
        The roles, in the order given; `None` stays `None`.

    Raises:
        Exception: what the first of them raised that failed, after all have started or failed.
    """
    started = await asyncio.gather(*starting, return_exceptions=True)
    failed = [role for role in started if isinstance(role, BaseException)]
    for role in started:
        if role is not None and not isinstance(role, BaseException):
            stack.push_async_callback(role.close)
    if failed:
        raise failed[0]
    return started
