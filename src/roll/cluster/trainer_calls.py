"""What the controller asks of a trainer, wherever its ranks run: each method of a `TrainBackend`, as a coroutine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from roll.protocols import LossFn, StateKind
from roll.types import AttentionRange, Output, Outputs, StepResult, TrainingBatch

__all__ = ["TrainerCalls"]


class TrainerCalls(ABC):
    """See `TrainBackend` for what each method does."""

    @abstractmethod
    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """A method of the back-end's, on all ranks; what rank 0 answers."""

    async def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        return await self._call("train_step", batch, loss)

    async def forward(
        self,
        batch: TrainingBatch,
        outputs: Outputs,
        *,
        attention: AttentionRange | None = None,
        num_top: int | None = None,
        adapter: bool = True,
    ) -> Mapping[Output, list[Any]]:
        return await self._call("forward", batch, outputs, attention=attention, num_top=num_top, adapter=adapter)

    async def measure(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        return await self._call("measure", batch, loss)

    async def save(self, path: Path) -> None:
        await self._call("save", path.absolute())

    async def load(self, path: Path) -> None:
        await self._call("load", path.absolute())

    async def export(self, path: Path) -> None:
        await self._call("export", path.absolute())

    async def offload(self, states: Collection[StateKind]) -> None:
        await self._call("offload", states)

    async def reload(self, states: Collection[StateKind]) -> None:
        await self._call("reload", states)
