"""Interfaces of trainers that the controller uses, and of losses that trainers use."""

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
"""State of a trainer: the network's parameters, or the state that only updates need."""


class LossFn(Protocol):
    """A loss; it must be picklable, since it is sent to the trainer's ranks."""

    @property
    def needs(self) -> Needs:
        """Inputs that the trainer must provide in addition to the network's predictions."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute a micro-batch's share of the loss of the global batch."""
        ...


@runtime_checkable
class WeightSource(Protocol):
    """Re-iterable stream of weights with the names of the HF checkpoint; one tensor is in memory at a time.

    With several ranks, iteration is collective: every rank iterates, rank 0 gets the full tensors, the others `None`.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def names(self) -> Sequence[str]:
        """Return all names, in the order of iteration. Tied weights appear once."""
        ...


@runtime_checkable
class TrainBackend(Protocol):
    """One rank of a trainer. With several ranks, every method is collective and every rank gets the whole batch.

    A policy computes log-probs and is trained; a critic computes values and is trained; a reference computes log-probs.
    """

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """Run all micro-batches and one optimizer step: `forward_backward`, then `optim_step`."""
        ...

    def forward_backward(
        self, batch: TrainingBatch, loss: LossFn, counts: BatchCounts | None = None, *, last: bool = False
    ) -> ForwardBackwardResult:
        """Accumulate the gradient of a batch's loss.

        The gradients of batches with the same `counts` add up to the gradient of one batch of all their samples. After
        an error, all gradients since the last update are lost.

        Args:
            batch: A batch with all samples of each of its sequences and units.
            loss: The loss of the batch.
            counts: Counts that the loss divides by; by default those of the batch.
            last: Whether this is the last batch before the update.
        """
        ...

    def optim_step(self, params: OptimParams | None = None, scale: float = 1.0) -> OptimResult:
        """Update the weights with the accumulated gradients, and reset the gradients.

        Args:
            params: Settings of this update; a setting that is `None` is as configured.
            scale: Factor on the gradient before it is clipped.
        """
        ...

    def discard_gradients(self) -> None:
        """Discard the gradients since the last update."""
        ...

    def use_adapter(self, name: str) -> None:
        """Compute, train, save and export with this LoRA adapter from now on; a new one is initialized like the first.

        Each adapter has its own weights, gradients, optimizer state and schedule. A trainer begins with `default`.

        Raises:
            UnsupportedError: The trainer has no adapters, or the back-end supports only one.
        """
        ...

    def forward(
        self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions | None = None
    ) -> Mapping[Output, list[Any]]:
        """Compute outputs of the current weights for a batch, without a gradient: for each output, a list by sample.

        Args:
            batch: A batch with tokens, the start of answers (`prefix_length`), and loss masks.
            outputs: Outputs to compute. Log-probs are under the batch's temperature, with 0 as the first entry; values
                and top-k log-probs are 0 outside the loss mask.
            options: Options of the forward pass.

        Raises:
            UnsupportedError: The role's network does not compute an output.
            ValueError: The snapshot of the requested version does not exist.
        """
        ...

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        """Copy the trained weights to host memory as `version`, and drop all snapshots that are not in `versions`."""

    def measure(self, batch: TrainingBatch, loss: LossFn) -> ForwardBackwardResult:
        """Compute a loss and its metrics under the current weights, without changing any state."""
        ...

    def weights(self) -> WeightSource:
        """Return the weights that the engines must hold: LoRA merged, in the engine's dtype, with HF names."""
        ...

    def save(self, path: Path, *, background: bool = False) -> None:
        """Save everything needed to resume (weights, optimizer, schedule, this rank's RNG) below `path`.

        With `background`, the current state is written while training continues; an earlier background save is finished
        first.
        """
        ...

    def is_save_written(self, *, wait: bool) -> bool:
        """Return whether the last save is on disk; the error of a failed background save is raised here, once."""
        ...

    def load(self, path: Path) -> None:
        """Load the state that `save` wrote, also with a different number of ranks."""
        ...

    def export(self, path: Path) -> None:
        """Export an HF safetensors model directory that `transformers` loads."""
        ...

    def offload(self, states: Collection[StateKind]) -> None:
        """Offload states to host memory between steps, so that other roles can use the device memory."""
        ...

    def onload(self, states: Collection[StateKind]) -> None:
        """Onload states to the device, where they must be for any computation."""
        ...


class Scorer(Protocol):
    """A model that computes outputs of a batch: a trainer, a reference, or a policy without its adapters."""

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[Output, list[Any]]:
        """See `TrainBackend.forward`."""
        ...


class TrainerGroup(ABC):
    """All ranks of a trainer, seen from the controller; the methods are those of `TrainBackend`, as coroutines.

    `cluster/` has an in-process implementation and a Ray one.
    """

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @abstractmethod
    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the back-end on all ranks and return the result of rank 0."""

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
        """Announce the weights through `deliver`, send them while it runs, and release them when it returns.

        Returns:
            64-bit checksums of the sent bytes, by tensor name.
        """

    async def save(self, path: Path, *, background: bool = False) -> None:
        await self._call("save", path.absolute(), background=background)

    async def is_save_written(self, *, wait: bool) -> bool:
        return await self._call("is_save_written", wait=wait)

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
