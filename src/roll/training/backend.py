"""The `torch` train back-end: one rank of a trainer, in any role.

    batch -> passes, one a micro-batch: network -> log-probs or values -> loss -> backward (gradients add up)
          -> global gradient norm -> AdamW on the master weights -> network

Invariants: a micro-batch's loss is already its share of the batch's loss, so nothing divides by the number of
micro-batches or ranks; a step whose gradients are not finite changes nothing. A reference has neither gradients nor an
optimiser.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.config.training import closes_heap
from roll.errors import HalfUpdatedError, UnsupportedError
from roll.protocols import LossFn, StateKind, WeightSource
from roll.training.distributed import Ranks, default_num_threads, pick_device, reshard, shard
from roll.training.export import export_trained
from roll.training.heap import close_heap_after
from roll.training.loading import build_network
from roll.training.offload import StatePlacement
from roll.training.optimizer import Optimizer
from roll.training.passes import Passes
from roll.training.policy import PolicyNetwork
from roll.training.precision import MasterWeights, Precision
from roll.training.randomness import Randomness
from roll.training.recompute import slice_mlps
from roll.training.schedule import Schedule
from roll.training.skipping import note_skipped
from roll.training.spec import TrainerSpec
from roll.training.stages import add_up_tied, check_cut, cut
from roll.training.state import load_state, state_of, write_entries
from roll.training.state_writer import StateWriter
from roll.training.unread import Unread
from roll.training.value import ValueNetwork
from roll.training.weights import TrainerWeights, whole
from roll.types import AttentionRange, Output, Outputs, StepResult, TrainingBatch

__all__ = ["TorchBackend"]


class TorchBackend:
    """One rank of a trainer, in this process. See `roll.protocols.TrainBackend`.

    Args:
        spec: what to build.
        precision: overrides the model's dtype; for tests in float64.

    Raises:
        ModelError: the model cannot be loaded, or its architecture cannot be packed.

    `train_step` is for policies and critics; what `forward` can say is what the role's network gives. Asked for
    anything else, a back-end raises `UnsupportedError`.
    """

    def __init__(self, spec: TrainerSpec, *, precision: Precision | None = None) -> None:
        self.spec = spec
        self.schedule = spec.schedule or Schedule.of(spec.training)
        self.precision = precision or Precision.of(spec.model.dtype)
        if spec.role == "reference":
            self.precision = Precision(compute=self.precision.compute, master=self.precision.compute)
        torch.set_num_threads(spec.training.num_threads or default_num_threads(spec.node_ranks))
        self.device = pick_device(spec)
        self.ranks = Ranks(spec, self.device)
        self.network = self._build()
        self.model = self.network.root
        if spec.training.mlp_slice_tokens is not None:
            slice_mlps(self.network, spec.training.mlp_slice_tokens)
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        heads = self.network.heads if isinstance(self.network, PolicyNetwork) else {}
        copies = self.network.cut.copies if self.network.cut is not None else ()
        self.masters = MasterWeights(trainable | heads, self.precision, copies)
        rate = spec.value_head_learning_rate or self.schedule.peak
        self.optimizer = Optimizer(
            self.masters, spec.training, self.ranks, dict.fromkeys(heads, rate / self.schedule.peak)
        )
        self.placement = StatePlacement(self.network, self.masters, self.optimizer, self.device)
        if self.device.type == "cpu" and closes_heap(spec.model, spec.training, self.ranks.size):
            close_heap_after(getattr(self.network.decoder, "layers", ()))
        self._writer = StateWriter(self.ranks)
        self._randomness = Randomness(spec.seed + self.ranks.stream, self.device)
        self._passes = Passes(spec, self.network, self.ranks, self.device, self._randomness)
        self.num_steps = 0
        """Optimiser steps that moved the weights."""
        self.num_nonfinite = 0
        """Steps in a row whose gradients were not finite."""

    def _build(self) -> PolicyNetwork | ValueNetwork:
        """The network, of which several ranks each read what is theirs."""
        spec, ranks, dtype = self.spec, self.ranks, self.precision.compute
        if ranks.size == 1:
            return build_network(spec, dtype).to(self.device)
        in_4_bits = spec.model.lora is not None and spec.model.lora.base == "nf4"  # what is quantised is read whole
        unread = Unread()
        network = build_network(spec, dtype, None if in_4_bits else unread)
        if ranks.stage is not None:
            with unread.lent():
                check_cut(network, ranks.stage.count)
            cut(network, ranks.stage, ranks.share, dtype)
        for tensor in (*network.parameters(), *network.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)
        if ranks.mesh is not None:
            shard(network, ranks, self.precision)
        unread.fill(network, self.device)
        return network

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """All micro-batches and one optimiser step.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
            TrainingDivergedError: gradients were not finite `training.max_nonfinite_steps` times in a row.
        """
        if self.spec.role == "reference":
            raise UnsupportedError("a trainer with role 'reference' has no train_step: ask a policy or critic")
        started = time.perf_counter()
        self.masters.clear_grads()
        self.network.train()
        with self._randomness.untouched_by_errors():
            found = self._passes.losses(batch, loss, self._backward)
        if self.network.cut is not None:
            add_up_tied(self.network.cut, self.masters)
        backward_done = time.perf_counter()
        grad_norm = self.optimizer.grad_norm()
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
        found = self._passes.losses(batch, loss)
        reshard(self.network)
        return found

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
            ValueError: `adapter` is false and the policy has none, attention is asked for without its distances, or
                the likeliest tokens without their number.
        """
        said = self._passes.forward(batch, outputs, attention=attention, num_top=num_top, adapter=adapter)
        reshard(self.network)
        return said

    def weights(self) -> WeightSource:
        """All weights: adapters merged, the model's dtype, HF names. For a policy, what the engines must hold."""
        adapted, is_first = self.spec.model.lora is not None, self.ranks.is_first
        return TrainerWeights.of(self.network, adapted=adapted, dtype=self.engine_dtype, is_first=is_first)

    def save(self, path: Path, *, background: bool = False) -> None:
        """Write everything needed to go on below `path`, an empty or missing directory; fsynced."""
        self._writer.finish()
        state = state_of(self.masters, self.optimizer, self._counters(), self.ranks, self._randomness, self._biases)
        if background:
            self._writer.begin(path, state)
        else:
            write_entries(path, state, self.ranks)

    def written(self, *, wait: bool) -> bool:
        """Whether the last save is on the disk.

        Raises:
            CheckpointError: it was begun in the background and could not be written; said once.
        """
        if wait or self._writer.is_done:
            self._writer.finish()
        return self._writer.is_done

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also under another number of ranks.

        Raises:
            CheckpointError: it is incomplete, damaged, or of another model.
        """
        parts = self.masters, self.optimizer, self._counters(), self.ranks, self._randomness
        counters = load_state(path, *parts, self.spec.seed, self._biases)
        self.num_steps, self.num_nonfinite = counters["num_steps"], counters["num_nonfinite"]

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads; a critic as a token classifier.

        Adapters are merged into it; a policy's and a reward model's are written once more on their own, as `adapter/`
        beside it.
        """
        export_trained(path, self.spec, self.network, self.weights(), self._read, is_first=self.ranks.is_first)

    def offload(self, states: Collection[StateKind]) -> None:
        """Move states to main memory, between steps. On a CPU they are there already."""
        self.placement.offload(states)

    def reload(self, states: Collection[StateKind]) -> None:
        """Move states back to the device."""
        self.placement.reload(states)

    def close(self) -> None:
        """Leave the process group; the back-end cannot be used any more."""
        self.ranks.close()

    @property
    def engine_dtype(self) -> torch.dtype:
        """What the engines compute in."""
        return getattr(torch, self.spec.model.dtype)

    def _read(self, name: str) -> Tensor:
        own, part = dict(self.model.named_parameters()), self.network.cut
        return own[name] if part is None else part.brought(name, whole(part.all_tensors(own)[name]))

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    @property
    def _biases(self) -> list[Tensor]:
        """Of a mixture's routers; what moves them is no gradient."""
        routing = self.network.routing if isinstance(self.network, PolicyNetwork) else None
        return [] if routing is None else routing.biases

    def _counters(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_nonfinite": self.num_nonfinite}

    def _move_weights(self, loss: float, grad_norm: float, rate: float) -> bool:
        """Whether the optimiser made its step: not where loss or gradients are not finite."""
        if bool(np.isfinite(grad_norm)) and bool(np.isfinite(loss)):
            try:
                self.optimizer.step(rate, grad_norm)
            except Exception as error:
                raise HalfUpdatedError(f"the optimiser failed: {type(error).__name__}: {error}") from error
            self.num_steps += 1
            self.num_nonfinite = 0
            if self.spec.training.router_bias_rate and isinstance(self.network, PolicyNetwork):
                assert self.network.routing is not None
                self.network.routing.move_biases(self.spec.training.router_bias_rate)
            return True
        self.num_nonfinite += 1
        note_skipped(loss, grad_norm, self.num_nonfinite, self.spec.training.max_nonfinite_steps)
        return False
