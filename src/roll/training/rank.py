"""One rank of a trainer: the operations that all trainers share, and the conditions of an update.

    forward_backward   passes: network, loss, backward, which adds to the gradient
    optim_step         gradient x scale ─ update, unless loss or gradient is not finite; the gradient is dropped
    train_step         both, for one batch
    measure            the same passes without gradients

    TrainerRank ─┬─ LanguageModelRank (`language_rank`): log-probs, weights for engines, export
                 └─ TorchRank (`torch_rank`): master weights, AdamW, FSDP2, checkpoints

Methods that depend on the back-end are abstract here: building the network, sharding its weights and states, and
updating them. A micro-batch's loss is already its contribution to the batch's loss, so nothing is divided by the number
of micro-batches or ranks. A step with a non-finite loss or gradients changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from roll.errors import PartialUpdateError, TrainingDivergedError, UnsupportedError
from roll.openmp import start_spin_control
from roll.protocols import StateKind
from roll.training.distributed import Ranks, choose_num_threads, pick_device
from roll.training.parallel.fsdp import reshard_after_forward
from roll.training.random_states import RandomStates
from roll.training.schedule import Schedule
from roll.training.spec import TrainerSpec
from roll.types import BatchCounts, ForwardBackwardResult, OptimParams, OptimResult, StepResult

__all__ = ["TrainerRank", "invalidate_on_failure"]

logger = logging.getLogger(__name__)

B = TypeVar("B")
L = TypeVar("L")


class TrainerRank(ABC, Generic[B, L]):
    """The base class of trainers: one rank of a trainer in any role. See `roll.protocols.TrainBackend`.

    `B` is the type of a batch, `L` that of a loss.

    Args:
        spec: The spec of the rank. The `__init__` of a subclass must also set `network` and `_passes`.
    """

    network: Any
    """The network, a module."""
    _passes: Any
    """An object with the method `compute_losses` of `PassRunner` (`roll.training.passes`), for batches of type `B` and
    losses of type `L`."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.schedule = spec.schedule or Schedule.from_config(spec.training)
        torch.set_num_threads(spec.training.num_threads or choose_num_threads(spec.node_ranks))
        # Spinning OpenMP threads of a trainer would take CPU time from engines in other processes.
        start_spin_control()
        self.device = pick_device(spec)
        self.ranks = Ranks(spec, self.device)
        self._random_states = RandomStates((spec.seed + self.ranks.stream) % 2**64, self.device)
        self.num_steps = 0
        """The number of optimizer steps that changed the weights."""
        self.num_nonfinite = 0
        """The number of consecutive steps with a non-finite loss or gradients."""
        self._has_gradients = False
        """True if a batch's gradient has been added since the last update."""
        self._summed_loss = 0.0
        """The loss of the batches whose gradients have been added."""

    def train_step(self, batch: B, loss: L) -> StepResult:
        """Run all micro-batches of a batch and one optimizer step.

        Raises:
            ValueError: No token of the batch is in the loss, or a sample lacks an input of the loss.
            TrainingDivergedError: Gradients were not finite in `training.max_nonfinite_steps` consecutive steps.
            UnsupportedError: The role is not trained, or the back-end cannot continue after a failed step.
            PartialUpdateError: The optimizer failed during the update.
        """
        self._check_trained("does not support train_step: use a policy or critic")
        started = time.perf_counter()
        self.discard_gradients()
        result = self.forward_backward(batch, loss, last=True)
        backward_done = time.perf_counter()
        update = self.optim_step()
        finished = time.perf_counter()
        own = {each.name: getattr(result, each.name) for each in fields(result)}  # `asdict` would copy the arrays
        return StepResult(
            **own,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            stepped=update.stepped,
            timings_s={"forward_backward": backward_done - started, "optimizer": finished - backward_done},
        )

    def forward_backward(
        self, batch: B, loss: L, counts: BatchCounts | None = None, *, last: bool = False
    ) -> ForwardBackwardResult:
        """Run the forward and backward passes of a batch and accumulate the gradient; see
        `TrainBackend.forward_backward`.

        Raises:
            ValueError: No token of the batch is in the loss, and `counts` is not given, or a sample lacks an input of
                the loss.
            UnsupportedError: The role is not trained, or the back-end supports only `last=True`.
        """
        self._check_trained("does not support forward_backward: use a policy or critic")
        self._check_accumulation(last)
        if not self._has_gradients:
            self._clear_grads()
        self.network.train()
        try:
            with self._get_library_context(), self._random_states.restore_on_error():
                result = self._passes.compute_losses(batch, loss, self._backward, counts=counts, last=last)
        except BaseException:
            # Some micro-batches have added their gradients, others not. The next call drops all of them.
            self._has_gradients, self._summed_loss = False, 0.0
            raise
        self._has_gradients = True
        self._summed_loss += result.loss
        return result

    def optim_step(self, params: OptimParams | None = None, scale: float = 1.0) -> OptimResult:
        """Update the weights with the gradients accumulated since the last update; see `TrainBackend.optim_step`.

        Raises:
            ValueError: There is no gradient.
            TrainingDivergedError: Gradients were not finite in `training.max_nonfinite_steps` consecutive steps.
            UnsupportedError: The role is not trained, or the back-end cannot scale gradients or set `params`.
            PartialUpdateError: The optimizer failed during the update.
        """
        self._check_trained("does not support optim_step: use a policy or critic")
        if not self._has_gradients:
            raise ValueError("optim_step requires gradients: call forward_backward first")
        params = params or OptimParams()
        rate = (
            self.schedule.compute_learning_rate(self.num_steps)
            if params.learning_rate is None
            else params.learning_rate
        )
        self._check_params(params, scale)
        # Before the update, so that the same gradients are not applied again after a failure.
        loss, self._summed_loss, self._has_gradients = self._summed_loss * scale, 0.0, False
        with self._get_library_context():
            if scale != 1.0:
                self._scale_grads(scale)
            grad_norm, stepped = self._update(loss, rate, params)
        self._record_step(stepped, loss, grad_norm)
        if self.device.type != "cpu":  # wait for the update, so that later timings do not include it
            torch.accelerator.synchronize(self.device)
        return OptimResult(grad_norm=grad_norm, learning_rate=rate, stepped=stepped)

    def discard_gradients(self) -> None:
        """Drop the gradients accumulated since the last update.

        Raises:
            UnsupportedError: The back-end cannot discard gradients.
        """
        self._check_trained("has no gradients")
        self._has_gradients, self._summed_loss = False, 0.0
        self._clear_grads()

    @torch.no_grad()
    def measure(self, batch: B, loss: L) -> ForwardBackwardResult:
        """Return a loss and its metrics under the current weights, without changing them.

        Raises:
            ValueError: No token of the batch is in the loss, or a sample lacks an input of the loss.
        """
        self.network.eval()
        with self._get_library_context():
            result = self._passes.compute_losses(batch, loss)
        reshard_after_forward(self.network)
        return result

    @abstractmethod
    def save(self, path: Path, *, background: bool = False) -> None:
        """Write the complete state below `path`, an empty or missing directory, and fsync.

        If `background` is true, write the state in the background if the back-end supports that.
        """

    def is_save_written(self, *, wait: bool) -> bool:
        """Return True, because `save` waits until the state is on disk. Back-ends that write in the background override
        this method.
        """
        return True

    def load(self, path: Path) -> None:
        """Load a state saved by any back-end, even with a different number of ranks or a different layout.

        Raises:
            CheckpointError: The checkpoint is incomplete, corrupted, or of another model.
        """
        with self._get_library_context():
            counters = self._load(path)
        self._has_gradients, self._summed_loss = False, 0.0  # existing gradients belong to other weights
        self.num_steps, self.num_nonfinite = counters["num_steps"], counters["num_nonfinite"]

    @abstractmethod
    def offload(self, states: Collection[StateKind]) -> None:
        """Move states to host memory between steps. On a CPU, states are already in host memory.

        Offloading the optimizer drops the gradients accumulated since the last update.

        Raises:
            UnsupportedError: The back-end does not support offloading.
        """

    @abstractmethod
    def onload(self, states: Collection[StateKind]) -> None:
        """Move states back to the device."""

    def close(self) -> None:
        """Leave the process group; the back-end cannot be used any more."""
        self.ranks.close()

    @abstractmethod
    def _clear_grads(self) -> None:
        """Discard the gradients of an earlier step before the passes of a new step."""

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward pass of a micro-batch; see `roll.training.passes.BackwardFn`."""
        loss.backward()

    def _check_accumulation(self, last: bool) -> None:
        """Raise `UnsupportedError` if another batch follows before the update and the back-end cannot accumulate."""
        return

    def _check_params(self, params: OptimParams, scale: float) -> None:
        """Raise `UnsupportedError` if the back-end does not support these optimizer settings or this gradient scale."""
        given = [each.name for each in fields(params) if getattr(params, each.name) is not None]
        if unsupported := set(given) - {"learning_rate"}:
            raise UnsupportedError(
                f"training.backend {self.spec.training.backend} does not support changing "
                f"{', '.join(sorted(unsupported))} between updates: set training.backend to 'torch'"
            )

    @abstractmethod
    def _scale_grads(self, scale: float) -> None:
        """Multiply the accumulated gradients by `scale`, before clipping."""

    def _update(self, loss: float, learning_rate: float, params: OptimParams) -> tuple[float, bool]:
        """Run an optimizer step if loss and gradients are finite; return the gradient norm and whether the step ran."""
        grad_norm = self._compute_grad_norm()
        stepped = math.isfinite(grad_norm) and math.isfinite(loss)
        if stepped:
            with invalidate_on_failure():
                self._step_optimizer(learning_rate, grad_norm, params)
        return grad_norm, stepped

    @abstractmethod
    def _compute_grad_norm(self) -> float:
        """Reduce the gradients over the ranks and return the global norm; it is not finite if any gradient is not
        finite.
        """

    @abstractmethod
    def _step_optimizer(self, learning_rate: float, grad_norm: float, params: OptimParams) -> None:
        """Clip the gradients to `max_grad_norm` and run the optimizer step with this learning rate."""

    @abstractmethod
    def _load(self, path: Path) -> dict[str, int]:
        """Load a saved state in place and return the saved counters."""

    def _get_library_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager that the back-end's library requires around every call."""
        return contextlib.nullcontext()

    def _check_trained(self, problem: str) -> None:
        if self.spec.role == "reference":
            raise UnsupportedError(f"a trainer with role 'reference' {problem}")

    def _get_counters(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_nonfinite": self.num_nonfinite}

    def _record_step(self, was_updated: bool, loss: float, grad_norm: float) -> None:
        if was_updated:
            self.num_steps += 1
            self.num_nonfinite = 0
            return
        self.num_nonfinite += 1
        logger.warning(
            "step skipped: loss %s, gradient norm %s (%d consecutive steps)", loss, grad_norm, self.num_nonfinite
        )
        if self.num_nonfinite >= self.spec.training.max_nonfinite_steps:
            raise TrainingDivergedError(
                f"loss ({loss}) or gradient norm ({grad_norm}) was not finite in {self.num_nonfinite} consecutive "
                "steps. Lower training.learning_rate, or raise training.max_nonfinite_steps."
            )


@contextlib.contextmanager
def invalidate_on_failure() -> Iterator[None]:
    """Raise `PartialUpdateError` if the `with` block fails, because it may have updated only some of the weights.

    Raises:
        PartialUpdateError: the `with` block raised an exception.
    """
    try:
        yield
    except Exception as error:
        raise PartialUpdateError(f"the optimizer failed: {type(error).__name__}: {error}") from error
