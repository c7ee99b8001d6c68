"""A cluster without Ray: one rank of each trainer, and the engines, in this process.

Each trainer runs in its own thread, so that it does not block the controller's event loop; its calls run in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.cluster.base import set_media_dir
from roll.cluster.engines import ManagedEngineGroup
from roll.config.training import TRAINERS
from roll.inference import EngineSpec, build_engine, get_engine_capabilities
from roll.protocols import TrainBackend, TrainerGroup, WorkerPool
from roll.running import run_detached
from roll.types import WeightStore, WeightUpdate

if TYPE_CHECKING:
    from roll.tracking import RunDirectory
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
        """Load the model in the trainer's thread; if this call is canceled, the thread is left running."""
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
        self,
        policy_version: int,
        transport: str,
        deliver: Callable[[WeightUpdate], Awaitable[None]],
        store: WeightStore | None = None,
    ) -> Mapping[str, int]:
        from roll.training.engine_weights import build_engine_weights
        from roll.weights import Sender, send_weights

        self._sender = self._sender or Sender()
        return await send_weights(
            build_engine_weights(self._backend, self._spec),
            policy_version,
            transport,
            deliver,
            sender=self._sender,
            executor=self._thread,
            store=store,
        )

    async def close(self) -> None:
        """Wait for the running call, then stop the thread."""
        if self._sender is not None:
            self._sender.close()
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)


class LocalCluster:
    """Implements `Cluster` in this process; the configured machines and devices are ignored."""

    def __init__(self, config: object = None, roles: object = None, run: RunDirectory | None = None) -> None:
        """Store the run; `config` and `roles` are unused, but `open_cluster` passes them to every type of cluster."""
        self.media_dir = None if run is None else run.media_dir

    async def start_trainer(self, spec: TrainerSpec, role: str) -> LocalTrainerGroup:
        """See `Cluster.start_trainer`."""
        return await LocalTrainerGroup.start(set_media_dir(spec, self.media_dir))

    async def start_engines(
        self, specs: Sequence[EngineSpec], role: str, asleep: Sequence[Collection[str]] = ()
    ) -> ManagedEngineGroup:
        factories = {spec.engine_id: partial(build_engine, set_media_dir(spec, self.media_dir)) for spec in specs}
        return await ManagedEngineGroup.start(factories, asleep=asleep)

    def open_elastic_nodes(self, spec: EngineSpec, role: str) -> None:
        """Return `None`, because no node can join this cluster."""

    async def start_pool(self, num_workers: int) -> WorkerPool:
        from roll.cluster.pool import LocalWorkerPool

        return LocalWorkerPool(num_workers)

    def choose_transport(self, engine_kind: str) -> str:
        """Return `in_process` for engines in this process, and `shared_memory` for engines in other processes."""
        return "in_process" if get_engine_capabilities(engine_kind).shares_process else "shared_memory"

    async def close(self) -> None:
        """Do nothing, because this cluster does not own any resources."""
