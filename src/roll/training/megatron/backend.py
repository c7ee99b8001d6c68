"""The `megatron` train back-end: one rank of a trainer, in any role, of Megatron's layers.

    batch -> passes, one a micro-batch: network -> log-probs or values -> loss -> backward (gradients add up)
          -> Megatron's sums over the ranks -> global norm, clipping, AdamW on this data rank's part -> network

Invariants: those of the back-end `torch`, whose packing, attention, vocabulary, losses and checkpoints it shares.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.errors import HalfUpdatedError, UnsupportedError
from roll.protocols import LossFn, StateKind, WeightSource
from roll.training.distributed import Ranks, default_num_threads, pick_device
from roll.training.export import export_trained
from roll.training.loading import build_network
from roll.training.megatron.rebuilding import rebuild, weights_by_name
from roll.training.megatron.spread import SpreadWeights, Stream
from roll.training.megatron.starting import add_up, add_up_tied, check, distribute, join, new_optimizer
from roll.training.passes import Passes
from roll.training.randomness import Randomness
from roll.training.schedule import Schedule
from roll.training.skipping import note_skipped
from roll.training.spec import TrainerSpec
from roll.training.whole_state import load_whole, save_whole
from roll.types import AttentionRange, Output, Outputs, StepResult, TrainingBatch

__all__ = ["MegatronBackend"]

logger = logging.getLogger(__name__)


class MegatronBackend:
    """One rank of a trainer, in this process. See `roll.protocols.TrainBackend`.

    Args:
        spec: what to build; `spec.training.parallel` says how it is divided.

    Raises:
        ModelError: Megatron is not installed or has no device, or the model cannot be loaded, rebuilt or divided.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.schedule = spec.schedule or Schedule.of(spec.training)
        torch.set_num_threads(spec.training.num_threads or default_num_threads(spec.node_ranks))
        self.device = pick_device(spec)
        check(spec, self.device)
        self.ranks = Ranks(spec, self.device)
        join(spec, self.device)
        self._hf = build_network(spec, self.engine_dtype)
        self._model_names = [name for name, _ in self._hf.root.named_parameters()]
        self.network, config, whereabouts = rebuild(self._hf, spec.training, self.ranks)
        parameters = weights_by_name(self.network)
        self._ddp: Any = None
        self._optimizer: Any = None
        if spec.role == "reference":
            self.network.requires_grad_(False)
        else:
            heads = [name for name in parameters if name.startswith("value_head.")]
            factor = (spec.value_head_learning_rate or self.schedule.peak) / self.schedule.peak
            self._ddp = distribute(self.network, config)
            self._optimizer = new_optimizer(self._ddp, parameters, dict.fromkeys(heads, factor), spec.training)
        self.spread = SpreadWeights(parameters, whereabouts, self._ddp, self._optimizer)
        self._randomness = Randomness(spec.seed + self.ranks.stream, self.device)
        self._passes = Passes(spec, self.network, self.ranks, self.device, self._randomness, call=self._ddp)
        self.num_steps = 0
        """Optimiser steps that moved the weights."""
        self.num_nonfinite = 0
        """Steps in a row whose gradients were not finite."""

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """All micro-batches and one optimiser step.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
            TrainingDivergedError: gradients were not finite `training.max_nonfinite_steps` times in a row.
            UnsupportedError: the role is not trained.
        """
        self._check_trained("has no train_step: ask a policy or critic")
        started = time.perf_counter()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.network.train()
        with self._randomness.untouched_by_errors():
            found = self._passes.losses(batch, loss, self._backward)
        backward_done = time.perf_counter()
        grad_norm = self._reduce()
        rate = self.schedule.rate(self.num_steps)
        stepped = self._move_weights(found.loss, grad_norm, rate)
        finished = time.perf_counter()
        return replace(
            found,
            grad_norm=grad_norm,
            learning_rate=rate,
            stepped=stepped,
            timings_s={"forward_backward": backward_done - started, "optimizer": finished - backward_done},
        )

    @torch.no_grad()
    def measure(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """What a loss and its metrics are under the current weights; changes nothing.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
        """
        self.network.eval()
        return self._passes.losses(batch, loss)

    def forward(
        self,
        batch: TrainingBatch,
        outputs: Outputs,
        *,
        attention: AttentionRange | None = None,
        num_top: int | None = None,
        adapter: bool = True,
    ) -> dict[Output, list[Any]]:
        """What the current weights say of a batch, on every rank; see `TrainBackend.forward`.

        Raises:
            UnsupportedError: this role's network does not give an output.
            ValueError: `adapter` is false, attention is asked for without its distances, or the likeliest tokens
                without their number.
        """
        return self._passes.forward(batch, outputs, attention=attention, num_top=num_top, adapter=adapter)

    def weights(self) -> WeightSource:
        """All weights: the model's dtype, HF names; gathered one at a time."""
        return Stream(self.spread, self._model_names, is_first=self.ranks.is_first)

    def save(self, path: Path, *, background: bool = False) -> None:
        """Write everything needed to go on below `path`, an empty or missing directory; fsynced. Never in the
        background: Megatron's states are gathered on the way."""
        self._check_trained("has no state to save")
        save_whole(path, self.spread, self._counters(), self.ranks, self._randomness)

    def written(self, *, wait: bool) -> bool:
        """Always: `save` returns when it is."""
        return True

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also under another layout or another back-end.

        Raises:
            CheckpointError: it is incomplete, damaged, or of another model.
        """
        self._check_trained("has no state to load")
        parts = self.spread, self._counters(), self.ranks, self._randomness
        counters = load_whole(path, *parts, self.spec.seed)
        self.num_steps, self.num_nonfinite = counters["num_steps"], counters["num_nonfinite"]

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads; a critic as a token classifier."""
        weights, is_first = self.weights(), self.ranks.is_first
        export_trained(path, self.spec, self._hf, weights, self.spread.read, is_first=is_first)

    def offload(self, states: Collection[StateKind]) -> None:
        """On a CPU, states are in main memory already.

        Raises:
            UnsupportedError: on any other device.
        """
        if self.device.type != "cpu":
            raise UnsupportedError(
                "training.backend 'megatron' does not hand over a device's memory: give trainers and engines devices "
                "of their own"
            )
        logger.debug("nothing to offload: %s are in main memory already", ", ".join(states))

    def reload(self, states: Collection[StateKind]) -> None:
        """Nothing was offloaded."""

    def close(self) -> None:
        """Leave the process group; the back-end cannot be used any more."""
        if self.ranks.size > 1:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        self.ranks.close()

    @property
    def engine_dtype(self) -> torch.dtype:
        """What the engines compute in."""
        return getattr(torch, self.spec.model.dtype)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def _check_trained(self, lacks: str) -> None:
        if self._optimizer is None:
            raise UnsupportedError(f"a trainer with role 'reference' {lacks}")

    def _counters(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_nonfinite": self.num_nonfinite}

    def _reduce(self) -> float:
        """Add up all ranks' gradients; returns their global norm, not finite where any is not."""
        if self.network.cut is not None:
            add_up_tied(self.network.cut, weights_by_name(self.network))
        add_up(self._ddp)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _move_weights(self, loss: float, grad_norm: float, rate: float) -> bool:
        """Whether the optimiser made its step: not where loss or gradients are not finite."""
        training = self.spec.training
        if not math.isfinite(grad_norm) or not math.isfinite(loss):
            self.num_nonfinite += 1
            note_skipped(loss, grad_norm, self.num_nonfinite, training.max_nonfinite_steps)
            return False
        if grad_norm > training.max_grad_norm:
            grads = [p.grad for p in self._optimizer.get_parameters() if p.grad is not None]
            torch._foreach_mul_(grads, training.max_grad_norm / grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        try:
            self._optimizer.step_with_ready_grads()
        except Exception as error:
            raise HalfUpdatedError(f"the optimiser failed: {type(error).__name__}: {error}") from error
        self.num_steps += 1
        self.num_nonfinite = 0
        return True
