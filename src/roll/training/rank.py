"""One rank of a trainer under any back-end: its operations, and the conditions of an update.

    forward_backward   passes: network, loss, backward, which adds to the gradient
    optim_step         gradient x scale ─ update, unless loss or gradient is not finite; the gradient is dropped
    train_step         both, for one batch
    measure            the same passes without gradients
    forward            passes without a loss

Methods that depend on the back-end are abstract here: building the network, sharding its weights and states, and
updating them. A micro-batch's loss is already its share of the batch's loss, so nothing is divided by the number of
micro-batches or ranks. A step with a non-finite loss or gradients changes nothing.
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
from typing import Any

import torch
from torch import Tensor

from roll.errors import HalfUpdatedError, TrainingDivergedError, UnsupportedError
from roll.openmp import start_spin_control
from roll.protocols import LossFn, StateKind, WeightSource
from roll.training.checkpoint.export import export_trained
from roll.training.distributed import Ranks, default_num_threads, pick_device
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork
from roll.training.parallel.fsdp import reshard_after_forward
from roll.training.passes import Passes
from roll.training.randomness import Randomness
from roll.training.schedule import Schedule
from roll.training.spec import TrainerSpec
from roll.types import (
    BatchCounts,
    ForwardBackwardResult,
    ForwardOptions,
    OptimParams,
    OptimResult,
    Output,
    Outputs,
    StepResult,
    TrainingBatch,
)

__all__ = ["TrainerRank", "invalidate_on_failure"]

logger = logging.getLogger(__name__)


class TrainerRank(ABC):
    """One rank, in this process, of a trainer in any role. See `roll.protocols.TrainBackend`.

    Args:
        spec: The spec of the rank. A back-end's own `__init__` then builds its network and the passes.
    """

    network: PolicyNetwork | ValueNetwork
    _passes: Passes

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.schedule = spec.schedule or Schedule.of(spec.training)
        torch.set_num_threads(spec.training.num_threads or default_num_threads(spec.node_ranks))
        start_spin_control()
        self.device = pick_device(spec)
        self.ranks = Ranks(spec, self.device)
        self.head_factor = (spec.value_head_learning_rate or self.schedule.peak) / self.schedule.peak
        """The factor on the learning rate of a policy's value head."""
        self._randomness = Randomness((spec.seed + self.ranks.stream) % 2**64, self.device)
        self.num_steps = 0
        """The number of optimizer steps that moved the weights."""
        self.num_nonfinite = 0
        """The number of consecutive steps with a non-finite loss or gradients."""
        self._has_gradients = False
        """Whether a batch's gradient has been added since the last update."""
        self._summed_loss = 0.0
        """The loss of the batches whose gradients have been added."""

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """Run all micro-batches of a batch and one optimizer step.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
            TrainingDivergedError: gradients were not finite `training.max_nonfinite_steps` times in a row.
            UnsupportedError: the role is not trained, or the back-end cannot go on after a step that failed.
            HalfUpdatedError: the optimizer failed.
        """
        self._check_trained("does not support train_step: use a policy or critic")
        started = time.perf_counter()
        self.discard_gradients()
        found = self.forward_backward(batch, loss, last=True)
        backward_done = time.perf_counter()
        update = self.optim_step()
        finished = time.perf_counter()
        own = {each.name: getattr(found, each.name) for each in fields(found)}
        return StepResult(
            **own,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            stepped=update.stepped,
            timings_s={"forward_backward": backward_done - started, "optimizer": finished - backward_done},
        )

    def forward_backward(
        self, batch: TrainingBatch, loss: LossFn, counts: BatchCounts | None = None, *, last: bool = False
    ) -> ForwardBackwardResult:
        """Add the gradient of a batch's loss to those since the last update; see `TrainBackend.forward_backward`.

        Raises:
            ValueError: no token of the batch is in the loss, and `counts` is not given, or a sample lacks what the
                loss needs.
            UnsupportedError: the role is not trained, or the back-end needs a batch to be the last one.
        """
        self._check_trained("does not support forward_backward: use a policy or critic")
        self._check_accumulates(last)
        if not self._has_gradients:
            self._clear_grads()
        self.network.train()
        try:
            with self._library_context(), self._randomness.restored_on_error():
                found = self._passes.losses(batch, loss, self._backward, counts=counts, last=last)
        except BaseException:
            # Some micro-batches have added their gradients, others not. The next call drops all of them.
            self._has_gradients, self._summed_loss = False, 0.0
            raise
        self._has_gradients = True
        self._summed_loss += found.loss
        return found

    def optim_step(self, params: OptimParams | None = None, scale: float = 1.0) -> OptimResult:
        """Update the weights with the gradients accumulated since the last update; see `TrainBackend.optim_step`.

        Raises:
            ValueError: there is no gradient.
            TrainingDivergedError: gradients were not finite `training.max_nonfinite_steps` times in a row.
            UnsupportedError: the role is not trained, or the back-end cannot scale gradients or set `params`.
            HalfUpdatedError: the optimizer failed.
        """
        self._check_trained("does not support optim_step: use a policy or critic")
        if not self._has_gradients:
            raise ValueError("optim_step needs a gradient: call forward_backward first")
        params = params or OptimParams()
        rate = self.schedule.rate(self.num_steps) if params.learning_rate is None else params.learning_rate
        self._check_params(params, scale)
        loss, self._summed_loss, self._has_gradients = self._summed_loss * scale, 0.0, False
        with self._library_context():
            if scale != 1.0:
                self._scale_grads(scale)
            grad_norm, stepped = self._update(loss, rate, params)
        self._count(stepped, loss, grad_norm)
        if self.device.type != "cpu":  # wait for the update, so that later timings do not include it
            torch.accelerator.synchronize(self.device)
        return OptimResult(grad_norm=grad_norm, learning_rate=rate, stepped=stepped)

    def discard_gradients(self) -> None:
        """Drop the gradients accumulated since the last update.

        Raises:
            UnsupportedError: the back-end does not support it.
        """
        self._check_trained("has no gradients")
        self._has_gradients, self._summed_loss = False, 0.0
        self._clear_grads()

    @torch.no_grad()
    def measure(self, batch: TrainingBatch, loss: LossFn) -> ForwardBackwardResult:
        """Return a loss and its metrics under the current weights, without changing them.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
        """
        self.network.eval()
        with self._library_context():
            found = self._passes.losses(batch, loss)
        reshard_after_forward(self.network)
        return found

    def forward(
        self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions | None = None
    ) -> dict[Output, list[Any]]:
        """Return the outputs of the current weights, or of a snapshot, for a batch; see `Passes.forward`."""
        options = options or ForwardOptions()
        using = contextlib.nullcontext() if options.version is None else self._with_snapshot(options.version)
        with self._library_context(), using:
            said = self._passes.forward(batch, outputs, options)
            reshard_after_forward(self.network)
        return said

    def use_adapter(self, name: str) -> None:
        """See `TrainBackend.use_adapter`."""
        backend = self.spec.training.backend
        lacks = "has no model.lora" if self.spec.model.lora is None else f"trains one adapter alone with {backend}"
        raise UnsupportedError(f"adapter '{name}' cannot be used: the trainer {lacks}")

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        """See `TrainBackend.keep_snapshot`."""
        raise UnsupportedError(
            f"training.backend {self.spec.training.backend} does not support snapshots of weights: set it to torch"
        )

    def _with_snapshot(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the network has the weights of a snapshot."""
        raise UnsupportedError(
            f"training.backend {self.spec.training.backend} does not support snapshots of weights: set it to torch"
        )

    @abstractmethod
    def weights(self) -> WeightSource:
        """Return all weights: adapters merged, in the model's dtype, by HF names. For a policy these are what engines
        must hold.
        """

    @abstractmethod
    def save(self, path: Path, *, background: bool = False) -> None:
        """Write the complete state below `path`, an empty or missing directory, and fsync; in the background if
        supported.
        """

    def is_save_written(self, *, wait: bool) -> bool:
        """Return whether the last save is on disk; always true unless a back-end writes in the background."""
        return True

    def load(self, path: Path) -> None:
        """Load a state that any back-end saved, also with another number of ranks or another layout.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, or of another model.
        """
        with self._library_context():
            counters = self._load(path)
        self._has_gradients, self._summed_loss = False, 0.0  # existing gradients belong to other weights
        self.num_steps, self.num_nonfinite = counters["num_steps"], counters["num_nonfinite"]

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads; a critic as a token classifier.

        Adapters are merged into it. A policy's and a reward model's adapters are also written separately, to `adapter/`
        in the same parent directory.
        """
        is_first = self.ranks.is_first
        with self._library_context():
            export_trained(path, self.spec, self._hf_network, self.weights(), self._read, is_first=is_first)

    @abstractmethod
    def offload(self, states: Collection[StateKind]) -> None:
        """Move states to host memory, between steps. On a CPU they are there already.

        Offloading the optimizer drops the gradients accumulated since the last update.

        Raises:
            UnsupportedError: the back-end does not support it.
        """

    @abstractmethod
    def onload(self, states: Collection[StateKind]) -> None:
        """Move states back to the device."""

    def close(self) -> None:
        """Leave the process group; the back-end cannot be used any more."""
        self.ranks.close()

    @property
    def engine_dtype(self) -> torch.dtype:
        """The dtype that the engines compute in."""
        return getattr(torch, self.spec.model.dtype)

    @abstractmethod
    def _clear_grads(self) -> None:
        """Drop gradients that an earlier step left, before the passes of a step."""

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """See `roll.training.passes.Backward`."""
        loss.backward()

    def _check_accumulates(self, last: bool) -> None:
        """Raise `UnsupportedError` if the back-end must know the last batch before an update and this is not it."""
        return

    def _check_params(self, params: OptimParams, scale: float) -> None:
        """Raise `UnsupportedError` if the back-end cannot update with these settings."""
        given = [each.name for each in fields(params) if getattr(params, each.name) is not None]
        if unsupported := set(given) - {"learning_rate"}:
            raise UnsupportedError(
                f"training.backend {self.spec.training.backend} does not support changing "
                f"{', '.join(sorted(unsupported))} from "
                "one update to the next: set it to torch"
            )

    @abstractmethod
    def _scale_grads(self, scale: float) -> None:
        """Multiply the gradients that were added, before they are clipped."""

    def _update(self, loss: float, rate: float, params: OptimParams) -> tuple[float, bool]:
        """Make an optimizer step if loss and gradients are finite; return the global gradient norm and whether it was
        made.
        """
        grad_norm = self._grad_norm()
        stepped = math.isfinite(grad_norm) and math.isfinite(loss)
        if stepped:
            with invalidate_on_failure():
                self._move_weights(rate, grad_norm, params)
        return grad_norm, stepped

    @abstractmethod
    def _grad_norm(self) -> float:
        """Reduce the gradients over the ranks and return their global norm; not finite where any gradient is not."""

    @abstractmethod
    def _move_weights(self, rate: float, grad_norm: float, params: OptimParams) -> None:
        """Clip to `max_grad_norm` and make the optimizer step with this learning rate."""

    @abstractmethod
    def _load(self, path: Path) -> dict[str, int]:
        """Load states in place and return the counters."""

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """Return a whole parameter of the network by HF name."""

    @property
    def _hf_network(self) -> PolicyNetwork | ValueNetwork:
        """The network with the configuration of an export."""
        return self.network

    def _library_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context that a library needs around every call."""
        return contextlib.nullcontext()

    def _check_trained(self, lacks: str) -> None:
        if self.spec.role == "reference":
            raise UnsupportedError(f"a trainer with role 'reference' {lacks}")

    def _counters(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_nonfinite": self.num_nonfinite}

    def _count(self, stepped: bool, loss: float, grad_norm: float) -> None:
        if stepped:
            self.num_steps += 1
            self.num_nonfinite = 0
            return
        self.num_nonfinite += 1
        logger.warning("step skipped: loss %s, gradient norm %s (%d in a row)", loss, grad_norm, self.num_nonfinite)
        if self.num_nonfinite >= self.spec.training.max_nonfinite_steps:
            raise TrainingDivergedError(
                f"loss {loss} or gradient norm {grad_norm} was not finite, {self.num_nonfinite} steps in a row. "
                "Lower training.learning_rate, or raise training.max_nonfinite_steps."
            )


@contextlib.contextmanager
def invalidate_on_failure() -> Iterator[None]:
    """Run the body, whose failure may leave some weights updated and others not.

    Raises:
        HalfUpdatedError: the body raised an exception.
    """
    try:
        yield
    except Exception as error:
        raise HalfUpdatedError(f"the optimizer failed: {type(error).__name__}: {error}") from error
