"""Workers of a sandbox service (`roll sandbox serve`) on the machines of a Ray cluster, one actor each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.errors import PlacementError
from roll_sandbox.worker import run_worker

__all__ = ["SandboxWorkers", "start_workers"]

_DRAIN_MARGIN_S = 10.0


class SandboxWorkerActor:
    """Runs the sandbox worker of one machine."""

    def __init__(self) -> None:
        self._leaving = asyncio.Event()

    async def serve(self, url: str, token: str, settings: Mapping[str, Any]) -> None:
        """Run the worker until `leave` is called: see `roll_sandbox.worker.run_worker`."""
        await run_worker(url, token, leaving=self._leaving, **settings)

    async def leave(self) -> None:
        """Stop accepting new sandboxes; `serve` returns when the last sandbox has ended."""
        self._leaving.set()


class SandboxWorkers:
    """The sandbox workers that `start_workers` started.

    Args:
        actors: The actor and the object reference of its `serve` call, by worker name.
        drain_s: See `start_workers`.
    """

    def __init__(self, actors: Mapping[str, tuple[Any, Any]], drain_s: float) -> None:
        self._actors = actors
        self._drain_s = drain_s

    @property
    def names(self) -> list[str]:
        """The names under which the workers are registered in the service."""
        return list(self._actors)

    async def wait(self) -> None:
        """Wait until one of the workers has ended.

        Raises:
            SandboxUnavailableError: a machine cannot run sandboxes.
            SandboxAccessError: the service rejects the token.
        """
        served = [asyncio.ensure_future(served) for _, served in self._actors.values()]
        done, _ = await asyncio.wait(served, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()

    async def close(self) -> None:
        """Make all workers leave the service, wait until their sandboxes end, and stop the workers."""
        with contextlib.suppress(RayError):
            await asyncio.gather(*(actor.leave.remote() for actor, _ in self._actors.values()))
        leaving = [asyncio.ensure_future(served) for _, served in self._actors.values()]
        if leaving:
            await asyncio.wait(leaving, timeout=self._drain_s + _DRAIN_MARGIN_S)
            for each in leaving:
                each.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        for actor, _ in self._actors.values():
            ray.kill(actor)


def start_workers(
    url: str, token: str, *, capacity: int = 512, drain_s: float = 25.0, **settings: Any
) -> SandboxWorkers:
    """Start a sandbox worker on every machine of the connected Ray cluster. The workers use no devices.

    Args:
        url: The URL at which the machines reach the sandbox service.
        token: A token with the scope `worker`.
        capacity: The largest number of concurrent sandboxes per machine.
        drain_s: Seconds that a leaving worker waits for its sandboxes to end.
        settings: Other settings of `roll_sandbox.worker.run_worker`.

    Raises:
        PlacementError: this process is not connected to a Ray cluster.
    """
    if not ray.is_initialized():
        raise PlacementError("sandbox workers require a Ray cluster: connect with `ray.init(address='auto')` first.")
    actors = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = f"ray-{node['NodeID'][:16]}"
            strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            actor: Any = ray.remote(SandboxWorkerActor).options(num_cpus=0, scheduling_strategy=strategy).remote()
            named = {"name": name, "capacity": capacity, "drain_s": drain_s, **settings}
            actors[name] = actor, actor.serve.remote(url, token, named)
    return SandboxWorkers(actors, drain_s)
