"""A worker pool with processes on every machine of a Ray cluster.

    submit ──► the node with the fewest calls per worker ──► PoolActor, one per node ──► its LocalWorkerPool

The local pools kill hanging calls, limit memory and replace dead processes, so calls behave as in a local pool; Ray
only transfers them. Invariants: a reply states whether it is a value, an error or a timeout, so it does not depend on
how Ray wraps exceptions; if the actor of a node dies, it is started again and its calls raise `WorkerDiedError`;
canceling a call cancels it on its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, TaskCancelledError

from roll.cluster.actor_log import redirect_to_run_log
from roll.cluster.pool import MEMORY_LIMIT_BYTES, LocalWorkerPool
from roll.errors import CpuTimeoutError, WorkerDiedError
from roll.protocols import ActorHandle

__all__ = ["PoolActor", "RayWorkerPool"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class PoolActor:
    """The worker processes of one node."""

    def __init__(self, num_workers: int, memory_limit_bytes: int) -> None:
        redirect_to_run_log()
        self._pool = LocalWorkerPool(num_workers, memory_limit_bytes=memory_limit_bytes)
        self._kept: dict[int, ActorHandle] = {}

    async def submit(
        self, function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float
    ) -> tuple[str, Any, dict[str, int]]:
        """Run a function in the node's pool.

        Returns:
            (`value`, the function's value), (`timeout`, a message) or (`error`, the error), followed by the pool's
            health.
        """
        try:
            value = await self._pool.submit(function, *args, time_limit_s=time_limit_s)
        except CpuTimeoutError as error:
            return *_pack_error(error), self._pool.health()
        except TimeoutError as error:
            return "timeout", str(error), self._pool.health()
        except Exception as error:  # the caller decides what a failure of its function means
            return *_pack_error(error), self._pool.health()
        return "value", value, self._pool.health()

    async def create_actor(
        self, object_id: int, factory: Callable[..., Any], args: tuple[Any, ...], prepare: tuple[Any, ...]
    ) -> tuple[str, Any]:
        """Create an object and store it under `object_id`; return (`value`, `None`) or (`error`, the error)."""
        try:
            self._kept[object_id] = await self._pool.create_actor(factory, *args, prepare=prepare)
        except Exception as error:
            return _pack_error(error)
        return "value", None

    async def call_actor(self, object_id: int, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
        """Call a method of an object; return (`value`, the method's value) or (`error`, the error)."""
        try:
            return "value", await self._kept[object_id].call(method, *args)
        except Exception as error:
            return _pack_error(error)

    async def release(self, object_id: int) -> None:
        """End the process of the object `object_id`, if it exists."""
        kept = self._kept.pop(object_id, None)
        if kept is not None:
            await kept.close()

    async def close(self) -> None:
        """End every worker."""
        await self._pool.close()


def _pack_error(error: Exception) -> tuple[str, Any]:
    return "error", (error, tuple(getattr(error, "__notes__", ())))


def _unpack_error(value: Any) -> Exception:
    """Return the exception of a reply, with its notes (`add_note`)."""
    error, notes = value
    for note in notes if not getattr(error, "__notes__", None) else ():
        error.add_note(note)
    return error


class _Node:
    """The controller's handle to the pool actor of one node."""

    def __init__(self, num_workers: int, memory_limit_bytes: int, options: dict[str, Any]) -> None:
        self.num_workers = num_workers
        self.num_calls = 0
        self.num_kept = 0
        self.counts = {"restarts": 0, "timeouts": 0}
        self._before = {"restarts": 0, "timeouts": 0}
        self._settings = (num_workers, memory_limit_bytes)
        self._options = options
        self.actor = self._start()

    def _start(self) -> Any:
        remote = ray.remote(PoolActor).options(max_restarts=0, max_concurrency=4096, **self._options)
        return remote.remote(*self._settings)

    def store_counts(self, health: dict[str, int]) -> None:
        """Store the counts in `health`, increased by the counts of this node's actors that died earlier."""
        self.counts = {name: self._before[name] + health[name] for name in self.counts}

    def replace(self, dead_actor: Any) -> None:
        """Start a new actor, unless `dead_actor` has been replaced already."""
        if dead_actor is self.actor:
            self.counts["restarts"] += self.num_workers
            self._before = dict(self.counts)
            self.actor = self._start()


class _RayActor:
    """Implements `ActorHandle` for an object on a node."""

    def __init__(self, node: _Node, object_id: int) -> None:
        self.object_id = object_id
        self._node, self._actor = node, node.actor
        self._closed = False
        node.num_kept += 1

    async def call(self, method: str, *args: Any) -> Any:
        if self._closed:
            raise WorkerDiedError("the actor's process was terminated")
        return await self.submit(lambda actor: actor.call_actor.remote(self.object_id, method, args))

    async def submit(self, start_call: Callable[[Any], Any]) -> Any:
        """Start a call by passing the node's actor to `start_call`; return the call's value, or raise its error."""
        reference = start_call(self._actor)
        try:
            kind, value = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except (RayActorError, TaskCancelledError) as error:
            self._node.replace(self._actor)
            raise WorkerDiedError(f"an actor of the worker pool died: {type(error).__name__}") from error
        if kind == "error":
            raise _unpack_error(value)
        return value

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._node.num_kept -= 1
            self._actor.release.remote(self.object_id)


class RayWorkerPool:
    """Implements `WorkerPool` on the machines of a Ray cluster.

    Args:
        num_workers: The total number of processes, spread evenly.
        nodes: The Ray options of the actor on each node; a single empty mapping means any machine.
        memory_limit_bytes: The memory limit of each process; 0 means no limit.
    """

    def __init__(
        self,
        num_workers: int,
        nodes: Sequence[dict[str, Any]] = ({},),
        *,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        used = list(nodes)[:num_workers]
        share, more = divmod(num_workers, len(used))
        self._options = list(nodes)
        self._nodes = [_Node(share + (index < more), memory_limit_bytes, options) for index, options in enumerate(used)]
        self._object_ids = itertools.count()
        self._closed = False

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        node = min(self._nodes, key=lambda node: node.num_calls / node.num_workers)
        actor = node.actor
        node.num_calls += 1
        reference = None
        try:
            reference = actor.submit.remote(function, args, time_limit_s)
            kind, value, health = await reference
        except asyncio.CancelledError:
            if reference is not None:
                ray.cancel(reference)
            raise
        except (RayActorError, TaskCancelledError) as error:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed") from None
            logger.warning("an actor of the worker pool died; starting a new one: %s", error)
            node.replace(actor)
            raise WorkerDiedError(f"an actor of the worker pool died: {type(error).__name__}") from error
        finally:
            node.num_calls -= 1
        node.store_counts(health)
        if kind == "timeout":
            raise TimeoutError(value)
        if kind == "error":
            raise _unpack_error(value)
        return value

    async def create_actor(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> ActorHandle:
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        node = min(self._nodes, key=lambda node: node.num_kept / node.num_workers)
        kept = _RayActor(node, next(self._object_ids))
        try:
            await kept.submit(lambda actor: actor.create_actor.remote(kept.object_id, factory, args, prepare))
        except BaseException:
            await kept.close()
            raise
        return kept

    def create_sub_pool(self, num_workers: int) -> RayWorkerPool:
        return RayWorkerPool(num_workers, self._options, memory_limit_bytes=0)

    def health(self) -> dict[str, int]:
        """Return the sums over all nodes; `restarts` and `timeouts` are from the last reply of each node."""
        return {
            "workers": sum(node.num_workers for node in self._nodes),
            "busy": sum(min(node.num_calls, node.num_workers) for node in self._nodes),
            "restarts": sum(node.counts["restarts"] for node in self._nodes),
            "timeouts": sum(node.counts["timeouts"] for node in self._nodes),
        }

    async def close(self) -> None:
        """End every worker; calls that are running or waiting raise `WorkerDiedError`. Calling it twice is safe."""
        closed, self._closed = self._closed, True
        if closed:
            return
        for node in self._nodes:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await node.actor.close.remote()
            ray.kill(node.actor, no_restart=True)
