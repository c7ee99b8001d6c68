"""A cluster without Ray: one rank of each trainer, and the engines, in this process.

A trainer runs in a thread of its own, so it does not block the controller's loop; calls keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.cluster.engines import StartedEngines
from roll.config.training import TRAINERS
from roll.inference import EngineSpec, build_engine, engine_capabilities
from roll.protocols import TrainBackend, TrainerGroup, WorkerPool
from roll.running import run_detached
from roll.types import WeightUpdate

if TYPE_CHECKING:
    from roll.training import TrainerSpec
    from roll.weights import Sender

__all__ = ["LocalCluster", "LocalTrainerGroup"]


class LocalTrainerGroup(TrainerGroup):
    """A trainer of one rank."""

    num_ranks = 1

    def __init__(self, backend: TrainBackend, thread: ThreadPoolExecutor, spec: TrainerSpec) -> None:
        self._backend = backend
        self._thread = thread
        self._spec = spec
        self._sender: Sender | None = None

    @classmethod
    async def start(cls, spec: TrainerSpec) -> LocalTrainerGroup:
        """Load the model in the trainer's thread, which is abandoned if this call is canceled."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.role)

        def build() -> TrainBackend:
            return TRAINERS.get(spec.training.backend)(spec)

        try:
            return cls(await run_detached(thread.submit(build)), thread, spec)
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            raise

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        call = partial(getattr(self._backend, name), *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def send_weights(
        self, policy_version: int, transport: str, deliver: Callable[[WeightUpdate], Awaitable[None]]
    ) -> Mapping[str, int]:
        from roll.training.engine_weights import engine_weights
        from roll.weights import Sender, send_weights

        self._sender = self._sender or Sender()
        return await send_weights(
            engine_weights(self._backend, self._spec),
            policy_version,
            transport,
            deliver,
            sender=self._sender,
            executor=self._thread,
        )

    async def close(self) -> None:
        """Wait for the running call, then free the thread."""
        if self._sender is not None:
            self._sender.close()
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)


class LocalCluster:
    """A cluster that is this process, whatever the configuration is; implements `Cluster`."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments: `CLUSTERS` passes the same ones to every kind of cluster."""

    async def start_trainer(self, spec: TrainerSpec, role: str) -> LocalTrainerGroup:
        """See `Cluster`, also for all methods below."""
        return await LocalTrainerGroup.start(spec)

    async def start_engines(self, specs: Sequence[EngineSpec], role: str) -> StartedEngines:
        return await StartedEngines.start({spec.engine_id: partial(build_engine, spec) for spec in specs})

    async def start_pool(self, num_workers: int) -> WorkerPool:
        from roll.cluster.pool import LocalWorkerPool

        return LocalWorkerPool(num_workers)

    def transport(self, engine_kind: str) -> str:
        """See `Cluster.transport`: by reference to an engine of this process, through host memory to others."""
        return "in_process" if engine_capabilities(engine_kind).shares_process else "shared_memory"

    async def close(self) -> None:
        """Do nothing: the cluster has no resources of its own."""
