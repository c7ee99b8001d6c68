"""One rank of each trainer, and the engines, in this process; no Ray.

A trainer's work runs in one thread of its own, so the controller's loop stays free; calls keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roll.cluster.engines import StartedEngines
from roll.config.training import TRAINERS
from roll.inference import EngineSpec, build_engine
from roll.protocols import LossFn, StateKind, TrainBackend, WorkerPool
from roll.types import AttentionRange, Output, Outputs, StepResult, TrainingBatch, WeightUpdate

if TYPE_CHECKING:
    from roll.training import TrainerSpec
    from roll.weights import Sender

__all__ = ["LocalCluster", "LocalTrainerGroup"]

T = TypeVar("T")


class LocalTrainerGroup:
    """A trainer of one rank; implements `TrainerGroup`."""

    num_ranks = 1

    def __init__(self, backend: TrainBackend, thread: ThreadPoolExecutor) -> None:
        self._backend = backend
        self._thread = thread
        self._sender: Sender | None = None

    @classmethod
    async def start(cls, spec: TrainerSpec) -> LocalTrainerGroup:
        """Load the model in the trainer's thread."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.role)

        def build() -> TrainBackend:
            return TRAINERS.get(spec.training.backend)(spec)

        try:
            return cls(await asyncio.get_running_loop().run_in_executor(thread, build), thread)
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            raise

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))

    async def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """See `TrainBackend`; so for all that follow."""
        return await self._call(self._backend.train_step, batch, loss)

    async def forward(
        self,
        batch: TrainingBatch,
        outputs: Outputs,
        *,
        attention: AttentionRange | None = None,
        num_top: int | None = None,
        adapter: bool = True,
    ) -> Mapping[Output, list[Any]]:
        """See `TrainBackend.forward`."""
        how: dict[str, Any] = {"attention": attention, "num_top": num_top, "adapter": adapter}
        return await self._call(lambda: self._backend.forward(batch, outputs, **how))

    async def measure(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """See `TrainBackend.measure`."""
        return await self._call(self._backend.measure, batch, loss)

    async def send_weights(
        self, policy_version: int, transport: str, deliver: Callable[[WeightUpdate], Awaitable[None]]
    ) -> Mapping[str, int]:
        from roll.weights import Sender, send_weights

        self._sender = self._sender or Sender()
        return await send_weights(
            self._backend.weights(),
            policy_version,
            transport,
            deliver,
            sender=self._sender,
            executor=self._thread,
        )

    async def save(self, path: Path) -> None:
        await self._call(self._backend.save, path)

    async def load(self, path: Path) -> None:
        await self._call(self._backend.load, path)

    async def export(self, path: Path) -> None:
        await self._call(self._backend.export, path)

    async def offload(self, states: Collection[StateKind]) -> None:
        """See `TrainBackend.offload`."""
        await self._call(self._backend.offload, states)

    async def reload(self, states: Collection[StateKind]) -> None:
        """See `TrainBackend.reload`."""
        await self._call(self._backend.reload, states)

    async def close(self) -> None:
        """Let the running call end, then free the thread."""
        if self._sender is not None:
            self._sender.close()
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)


class LocalCluster:
    """This process, whatever the configuration says; implements `Cluster`."""

    def __init__(self, *_: object) -> None:
        """`CLUSTERS` hands the same arguments to every kind of cluster."""

    async def start_trainer(self, spec: TrainerSpec, role: str) -> LocalTrainerGroup:
        """See `Cluster`; so for all that follow."""
        return await LocalTrainerGroup.start(spec)

    async def start_engines(self, specs: Sequence[EngineSpec], role: str) -> StartedEngines:
        return await StartedEngines.start({spec.engine_id: partial(build_engine, spec) for spec in specs})

    async def start_pool(self, num_workers: int) -> WorkerPool:
        from roll.cluster.pool import LocalWorkerPool

        return LocalWorkerPool(num_workers)

    def transport(self, engine_kind: str) -> str:
        """vLLM computes in a process of its own, the embedded engine in this one."""
        return "in_process" if engine_kind == "hf" else "shared_memory"

    async def close(self) -> None:
        """Nothing of its own to end."""
