"""What the controller asks of trainers, and trainers of losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from roll.types import (
    BatchCounts,
    ForwardBackwardResult,
    ForwardOptions,
    LossInputs,
    LossOutputs,
    Needs,
    OptimParams,
    OptimResult,
    Output,
    Outputs,
    StepResult,
    TrainingBatch,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch

__all__ = ["LossFn", "Scorer", "StateKind", "TrainBackend", "TrainerGroup", "WeightSource"]

StateKind: TypeAlias = Literal["parameters", "optimizer"]
"""Of a trainer: the network, and what updates alone need beside it."""


class LossFn(Protocol):
    """A loss; picklable, since it travels to the trainer's ranks."""

    @property
    def needs(self) -> Needs:
        """What the trainer must bring beside the network's predictions."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """A micro-batch's share of the loss of the global batch."""
        ...


@runtime_checkable
class WeightSource(Protocol):
    """Re-iterable stream of weights in the HF checkpoint's names; one tensor in memory at a time.

    With several ranks, iterating is collective: every rank iterates, rank 0 gets the full tensors, the others `None`s.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def names(self) -> Sequence[str]:
        """All names, in the order of iteration. Tied weights appear once."""
        ...


@runtime_checkable
class TrainBackend(Protocol):
    """One rank of a trainer. With several ranks, every method is collective and every rank gets the whole batch.

    A policy says log-probs and is trained; a critic says values and is trained; a reference says log-probs alone.
    """

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """All micro-batches and one optimizer step: `forward_backward`, then `optim_step`."""
        ...

    def forward_backward(
        self, batch: TrainingBatch, loss: LossFn, counts: BatchCounts | None = None, *, last: bool = False
    ) -> ForwardBackwardResult:
        """Add the gradient of a batch's loss to those since the last update.

        Batches of the same `counts` add up to the gradient of one batch of all their samples. After an error, all
        gradients since the last update are lost.

        Args:
            batch: all samples of each of its sequences and units.
            loss: of them.
            counts: that the loss divides by; those of the batch by default.
            last: whether no other batch is added before the update.
        """
        ...

    def optim_step(self, params: OptimParams | None = None, scale: float = 1.0) -> OptimResult:
        """Update the weights by the gradients since the last update, and forget them.

        Args:
            params: settings of this update; those that are `None` are as configured.
            scale: multiplies the gradient before it is clipped.
        """
        ...

    def discard_gradients(self) -> None:
        """Forget the gradients since the last update."""
        ...

    def use_adapter(self, name: str) -> None:
        """Compute, train, save and export with this LoRA adapter from now on; a new one begins as the first one did.

        Each has its own weights, gradients, optimizer state and schedule. A trainer begins with `default`.

        Raises:
            UnsupportedError: the trainer has no adapters, or the back-end holds one alone.
        """
        ...

    def forward(
        self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions | None = None
    ) -> Mapping[Output, list[Any]]:
        """Return what the current weights say of a batch, without a gradient: for each output a list by sample.

        Args:
            batch: its tokens, where answers begin (`prefix_length`), and which tokens the loss counts.
            outputs: what is asked for. Log-probs are those under the batch's temperature, with 0 as the first entry;
                values and the likeliest tokens are 0 where the loss does not count.
            options: how it is computed.

        Raises:
            UnsupportedError: the role's network does not give an output.
            ValueError: there is no snapshot of the version that is asked for.
        """
        ...

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        """Copy the trained weights to main memory as `version`; let go of all that are not in `versions`."""

    def measure(self, batch: TrainingBatch, loss: LossFn) -> ForwardBackwardResult:
        """What a loss and its metrics are under the current weights; changes nothing."""
        ...

    def weights(self) -> WeightSource:
        """What the engines must hold: LoRA merged, engine's dtype, HF names."""
        ...

    def save(self, path: Path, *, background: bool = False) -> None:
        """Write everything needed to go on (weights, optimiser, schedule, this rank's RNG) below `path`.

        In the background: as it is now, while training goes on; what was begun before is finished first.
        """
        ...

    def written(self, *, wait: bool) -> bool:
        """Whether the last save is on the disk; one in the background that failed raises here, once."""
        ...

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also under another number of ranks."""
        ...

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads."""
        ...

    def offload(self, states: Collection[StateKind]) -> None:
        """Hand the device's memory to other roles, between steps: move states to main memory."""
        ...

    def onload(self, states: Collection[StateKind]) -> None:
        """Take it back: move states to the device, where whatever computes with them must find them."""
        ...


class Scorer(Protocol):
    """Whatever says something of a batch: a trainer, a reference, a policy without its adapters."""

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[Output, list[Any]]:
        """See `TrainBackend.forward`."""
        ...


class TrainerGroup(ABC):
    """All ranks of a trainer, seen from the controller: each method of a `TrainBackend`, which says what it does, as a
    coroutine. `cluster/` has an in-process one and a Ray one.
    """

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @abstractmethod
    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """A method of the back-end's, on all ranks; what rank 0 answers."""

    async def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        return await self._call("train_step", batch, loss)

    async def forward_backward(
        self, batch: TrainingBatch, loss: LossFn, counts: BatchCounts | None = None, *, last: bool = False
    ) -> ForwardBackwardResult:
        return await self._call("forward_backward", batch, loss, counts, last=last)

    async def optim_step(self, params: OptimParams | None = None, scale: float = 1.0) -> OptimResult:
        return await self._call("optim_step", params, scale)

    async def discard_gradients(self) -> None:
        await self._call("discard_gradients")

    async def use_adapter(self, name: str) -> None:
        await self._call("use_adapter", name)

    async def forward(
        self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions | None = None
    ) -> Mapping[Output, list[Any]]:
        return await self._call("forward", batch, outputs, options)

    async def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        await self._call("keep_snapshot", version, tuple(versions))

    async def measure(self, batch: TrainingBatch, loss: LossFn) -> ForwardBackwardResult:
        return await self._call("measure", batch, loss)

    @abstractmethod
    async def send_weights(
        self, policy_version: int, transport: str, deliver: Callable[[WeightUpdate], Awaitable[None]]
    ) -> Mapping[str, int]:
        """Offer the weights through `deliver`, send while it runs, let go of them when it returns.

        Returns:
            By tensor name, the 64-bit checksum of the bytes that were sent.
        """

    async def save(self, path: Path, *, background: bool = False) -> None:
        await self._call("save", path.absolute(), background=background)

    async def written(self, *, wait: bool) -> bool:
        return await self._call("written", wait=wait)

    async def load(self, path: Path) -> None:
        await self._call("load", path.absolute())

    async def export(self, path: Path) -> None:
        await self._call("export", path.absolute())

    async def offload(self, states: Collection[StateKind]) -> None:
        await self._call("offload", states)

    async def onload(self, states: Collection[StateKind]) -> None:
        await self._call("onload", states)

    @abstractmethod
    async def close(self) -> None: ...
