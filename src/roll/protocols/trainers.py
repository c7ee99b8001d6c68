"""The controller's interfaces to trainers, and the trainers' interface to losses."""

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
    LossRequirements,
    OptimParams,
    OptimResult,
    OutputName,
    Outputs,
    StepResult,
    TrainingBatch,
    WeightStore,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch

__all__ = ["LossFn", "Scorer", "StateKind", "SupportsAdapterSync", "TrainBackend", "TrainerGroup", "WeightSource"]

StateKind: TypeAlias = Literal["parameters", "optimizer"]
"""Part of a trainer's state: the network's parameters, or the optimizer state."""


class LossFn(Protocol):
    """A loss; it must be picklable, since it is sent to the trainer's ranks."""

    @property
    def needs(self) -> LossRequirements:
        """Inputs that the trainer must provide in addition to the network's predictions."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return a micro-batch's contribution to the loss of the global batch."""
        ...


@runtime_checkable
class WeightSource(Protocol):
    """An iterable of (name in the HF checkpoint, weight); only one tensor is in memory at a time.

    It can be iterated repeatedly. With several ranks, iteration is collective: every rank iterates, rank 0 gets the
    full tensors, and the other ranks get `None`.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def names(self) -> Sequence[str]:
        """Return all names, in the order of iteration. Tied weights appear once."""
        ...


@runtime_checkable
class SupportsAdapterSync(Protocol):
    """An optional extension of `TrainBackend`: a back-end that can send only its LoRA adapter to engines."""

    def adapter_weights(self) -> WeightSource:
        """Return the tensors of the current adapter, in the engines' dtype, with the names of `roll.weights.adapters`.

        Collective.
        """
        ...


@runtime_checkable
class TrainBackend(Protocol):
    """One rank of a trainer. With several ranks, every method is collective, and every rank gets the whole batch.

    A back-end with the attribute `batch_share`, such as all built-in back-ends of language models, gets complete arrays
    only for the samples that the rank computes; see `roll.training.packing.division`.

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
            counts: The counts by which the loss is normalized; by default the counts of `batch`.
            last: Whether this is the last batch before the update.
        """
        ...

    def optim_step(self, params: OptimParams | None = None, scale: float = 1.0) -> OptimResult:
        """Update the weights with the accumulated gradients, and reset the gradients.

        Args:
            params: Settings of this update; for a setting that is `None`, the configured value is used.
            scale: Factor by which the gradient is multiplied before clipping.
        """
        ...

    def discard_gradients(self) -> None:
        """Discard the gradients accumulated since the last update."""
        ...

    def use_adapter(self, name: str) -> None:
        """Use a LoRA adapter in all later calls; for a new name, create an adapter with the initial weights.

        Each adapter has its own weights, gradients, optimizer state and schedule. A trainer starts with the adapter
        `default`.

        Raises:
            UnsupportedError: The trainer has no adapters, or the back-end supports only one adapter.
        """
        ...

    def forward(
        self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions | None = None
    ) -> Mapping[OutputName, list[Any]]:
        """Compute outputs for a batch with the current weights, without gradients; an output has one entry per sample.

        Args:
            batch: A batch with tokens, the start of answers (`prefix_length`), and loss masks.
            outputs: Outputs to compute. Log-probs are at the batch's temperature, with 0 as the first entry; values and
                top-k log-probs are 0 outside the loss mask.
            options: Options of the forward pass.

        Raises:
            UnsupportedError: The role's network cannot compute one of the outputs.
            ValueError: The trainer has no snapshot of the requested version.
        """
        ...

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        """Copy the trained weights to host memory as the snapshot `version`; drop snapshots not in `versions`."""

    def measure(self, batch: TrainingBatch, loss: LossFn) -> ForwardBackwardResult:
        """Compute a loss and its metrics under the current weights, without changing any state."""
        ...

    def weights(self) -> WeightSource:
        """Return the weights for a weight sync: with LoRA merged, in the engines' dtype, and with HF names."""
        ...

    def save(self, path: Path, *, background: bool = False) -> None:
        """Save everything needed to resume (weights, optimizer, schedule, this rank's RNG) under `path`.

        With `background`, the current state is written while training continues. A previous background save is
        finished first.
        """
        ...

    def is_save_written(self, *, wait: bool) -> bool:
        """Return whether the last save is on disk; the error of a failed background save is raised once."""
        ...

    def load(self, path: Path) -> None:
        """Load the state that `save` wrote, even with a different number of ranks."""
        ...

    def export(self, path: Path) -> None:
        """Export the model as an HF safetensors directory that `transformers` can load."""
        ...

    def offload(self, states: Collection[StateKind]) -> None:
        """Offload states to host memory between steps, so that other roles can use the device memory."""
        ...

    def onload(self, states: Collection[StateKind]) -> None:
        """Move offloaded states back to the device."""
        ...


class Scorer(Protocol):
    """A model that computes outputs of a batch: a trainer, a reference, or a policy without its adapters."""

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[OutputName, list[Any]]:
        """Compute outputs of a batch; see `TrainBackend.forward`."""
        ...


class TrainerGroup(ABC):
    """The controller's interface to all ranks of a trainer: the methods of `TrainBackend`, as coroutines.

    `roll.cluster` implements it in this process and with Ray.
    """

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @abstractmethod
    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the back-end on all ranks and return the result of rank 0."""

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method that only some back-ends have, on all ranks, and return the result of rank 0."""
        return await self._call(name, *arguments, **options)

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
    ) -> Mapping[OutputName, list[Any]]:
        return await self._call("forward", batch, outputs, options)

    async def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        await self._call("keep_snapshot", version, tuple(versions))  # a view of a dictionary cannot be pickled

    async def measure(self, batch: TrainingBatch, loss: LossFn) -> ForwardBackwardResult:
        return await self._call("measure", batch, loss)

    @abstractmethod
    async def send_weights(
        self,
        policy_version: int,
        transport: str,
        deliver: Callable[[WeightUpdate], Awaitable[None]],
        store: WeightStore | None = None,
    ) -> Mapping[str, int]:
        """Stage the weights, then send them while `deliver` passes the update to the engines, then release them.

        Args:
            policy_version: The version of the weights.
            transport: The name of the transport.
            deliver: A function that passes the update to the engines.
            store: The file store of the transport `store`.

        Returns:
            64-bit checksums of the sent bytes, by tensor name.
        """

    async def save(self, path: Path, *, background: bool = False) -> None:
        # Absolute, as in `load` and `export`: a rank in another process may have another working directory.
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
