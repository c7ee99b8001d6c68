"""The `deepspeed` train back-end: one rank of a trainer, in any role, whose weights and states ZeRO spreads.

    batch -> passes, one a micro-batch: network -> log-probs or values -> loss -> DeepSpeed's backward, which reduces
          -> DeepSpeed's step: global norm, clipping, AdamW on this rank's part -> network

Invariants: the loss is normalised by global counts, as everywhere, so that DeepSpeed's mean over ranks is undone and it
divides by no number of micro-batches; a step whose loss or gradients are not finite changes nothing; a checkpoint is
the same as that of the back-end `torch`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roll.errors import HalfUpdatedError, UnsupportedError
from roll.protocols import LossFn, StateKind, WeightSource
from roll.training.deepspeed.spread import SpreadWeights, read_whole
from roll.training.deepspeed.starting import check, local_rank, start, start_frozen, surroundings
from roll.training.distributed import Ranks, default_num_threads, pick_device
from roll.training.distributions import Predictions
from roll.training.export import export_trained
from roll.training.loading import build_network
from roll.training.passes import Passes
from roll.training.policy import PolicyNetwork
from roll.training.randomness import Randomness
from roll.training.recompute import slice_mlps
from roll.training.schedule import Schedule
from roll.training.skipping import note_skipped
from roll.training.spec import TrainerSpec
from roll.training.weights import TrainerWeights
from roll.training.whole_state import load_whole, save_whole
from roll.types import AttentionRange, Output, Outputs, StepResult, TrainingBatch

__all__ = ["DeepSpeedBackend"]

logger = logging.getLogger(__name__)


class DeepSpeedBackend:
    """One rank of a trainer, in this process. See `roll.protocols.TrainBackend`.

    Args:
        spec: what to build; `spec.training.deepspeed` says how it is spread.

    Raises:
        ModelError: DeepSpeed is not installed, or the model cannot be loaded, packed, or trained in its dtype.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.schedule = spec.schedule or Schedule.of(spec.training)
        self.stage = spec.training.deepspeed.zero_stage
        torch.set_num_threads(spec.training.num_threads or default_num_threads(spec.node_ranks))
        self.device = pick_device(spec)
        check(spec, self.device)
        self.ranks = Ranks(spec, self.device)
        self.network = build_network(spec, self.engine_dtype).to(self.device)
        if spec.training.mlp_slice_tokens is not None:
            slice_mlps(self.network, spec.training.mlp_slice_tokens)
        self.model = self.network.root
        self._engine: Any = None
        self.spread: SpreadWeights | None = None
        """Of a role that is trained."""
        if spec.role != "reference":
            heads = self.network.heads if isinstance(self.network, PolicyNetwork) else {}
            trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad} | heads
            factor = (spec.value_head_learning_rate or self.schedule.peak) / self.schedule.peak
            factors = dict.fromkeys(heads, factor)
            self._engine = start(spec, self.network, trainable, factors, device=self.device)
            self.spread = SpreadWeights(self._engine, trainable, self.stage, self.ranks.rank)
        elif self.stage == 3 and self.ranks.size > 1:
            self._engine = start_frozen(spec, self.network, device=self.device)
        self._randomness = Randomness(spec.seed + self.ranks.data_rank, self.device)
        call = None if self._engine is None else self._predict
        self._passes = Passes(spec, self.network, self.ranks, self.device, self._randomness, call=call)
        self._inside_step = False
        """Whether gradients of a step that was never made are waiting: a loss failed between its micro-batches."""
        self.num_steps = 0
        """Optimiser steps that moved the weights."""
        self.num_nonfinite = 0
        """Steps in a row whose gradients were not finite."""

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """All micro-batches and one optimiser step.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
            TrainingDivergedError: gradients were not finite `training.max_nonfinite_steps` times in a row.
            UnsupportedError: the role is not trained, or an earlier step failed halfway through its micro-batches.
        """
        if self.spread is None:
            raise UnsupportedError("a trainer with role 'reference' has no train_step: ask a policy or critic")
        if self._inside_step:
            raise UnsupportedError(
                "a step failed between its micro-batches, and DeepSpeed keeps their gradients: "
                "go on from a checkpoint, in a new process"
            )
        started = time.perf_counter()
        self._engine.train()
        with self._randomness.untouched_by_errors(), self._surroundings():
            found = self._passes.losses(batch, loss, self._backward)
        backward_done = time.perf_counter()
        rate = self.schedule.rate(self.num_steps)
        with self._surroundings():
            grad_norm, stepped = self._move_weights(rate)
        self._inside_step = False
        self._count(stepped, found.loss, grad_norm)
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
        with self._surroundings():
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
            ValueError: `adapter` is false and the policy has none, attention is asked for without its distances, or
                the likeliest tokens without their number.
        """
        with self._surroundings():
            return self._passes.forward(batch, outputs, attention=attention, num_top=num_top, adapter=adapter)

    def weights(self) -> WeightSource:
        """All weights: adapters merged, the model's dtype, HF names; gathered one at a time."""
        adapted, is_first = self.spec.model.lora is not None, self.ranks.is_first
        dtype = self.engine_dtype
        return TrainerWeights.of(self.network, adapted=adapted, dtype=dtype, is_first=is_first, read=self._whole)

    def save(self, path: Path, *, background: bool = False) -> None:
        """Write everything needed to go on below `path`, an empty or missing directory; fsynced. Never in the
        background: DeepSpeed's states are gathered on the way."""
        with self._surroundings():
            save_whole(path, self._trained(), self._counters(), self.ranks, self._randomness)

    def written(self, *, wait: bool) -> bool:
        """Always: `save` returns when it is."""
        return True

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also under another number of ranks, another stage or the back-end `torch`.

        Raises:
            CheckpointError: it is incomplete, damaged, or of another model.
        """
        parts = self._trained(), self._counters(), self.ranks, self._randomness
        with self._surroundings():
            counters = load_whole(path, *parts, self.spec.seed)
        self.num_steps, self.num_nonfinite = counters["num_steps"], counters["num_nonfinite"]

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads; a critic as a token classifier.

        Adapters are merged into it; a policy's and a reward model's are written once more on their own, as `adapter/`
        beside it.
        """
        with self._surroundings():
            export_trained(path, self.spec, self.network, self.weights(), self._read, is_first=self.ranks.is_first)

    def offload(self, states: Collection[StateKind]) -> None:
        """Move states to main memory, between steps. On a CPU they are there already.

        Raises:
            UnsupportedError: DeepSpeed cannot, at stage 0 or with weights that it offloads itself.
        """
        if self.device.type == "cpu":
            logger.debug("nothing to offload: %s are in main memory already", ", ".join(states))
            return
        if self.stage == 0 or self.spread is None or self.spec.training.deepspeed.offload_parameters:
            raise UnsupportedError(
                "DeepSpeed hands over the memory of a trained role only, from zero_stage 1 on and without "
                "offload_parameters: give trainers and engines devices of their own"
            )
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        kinds = [Kind.lp_params] if "parameters" in states else []
        if "optimizer" in states:
            kinds += [Kind.optim_states, Kind.hp_params, Kind.lp_grads, Kind.contiguous_grad_buffer]
        self._engine.offload_states(include=kinds)
        torch.get_device_module(self.device).empty_cache()

    def reload(self, states: Collection[StateKind]) -> None:
        """Move states back to the device; DeepSpeed moves all that it offloaded."""
        if self.device.type != "cpu":
            self._engine.reload_states()

    def close(self) -> None:
        """Leave the process group; the back-end cannot be used any more."""
        if self._engine is not None:
            self._engine.destroy()
        self.ranks.close()

    @property
    def engine_dtype(self) -> torch.dtype:
        """What the engines compute in."""
        return getattr(torch, self.spec.model.dtype)

    def _surroundings(self) -> contextlib.AbstractContextManager[None]:
        return surroundings(local_rank(self.spec, self.device))

    def _trained(self) -> SpreadWeights:
        if self.spread is None:
            raise UnsupportedError("a trainer with role 'reference' has no state to save or load")
        return self.spread

    def _predict(self, *arguments: Any) -> Predictions:
        return Predictions(*self._engine(*arguments))

    def _read(self, name: str) -> Tensor:
        return self._whole(self.model.get_parameter(name))

    def _whole(self, tensor: Tensor) -> Tensor:
        with self._surroundings():
            return read_whole(tensor) if isinstance(tensor, nn.Parameter) else tensor

    def _counters(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_nonfinite": self.num_nonfinite}

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """DeepSpeed takes the mean over ranks, and sees gradients alone: a loss that is not finite gives it some."""
        self._inside_step = True
        self._engine.set_gradient_accumulation_boundary(last)
        summed = loss * self.ranks.data_size
        self._engine.backward(summed if torch.isfinite(loss) else summed * math.nan, scale_wrt_gas=False)

    def _move_weights(self, rate: float) -> tuple[float, bool]:
        """The gradient norm, and whether the optimiser made its step: not where gradients are not finite."""
        engine = self._engine
        for group in engine.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        try:
            if self.stage == 0:
                return self._move_replicated_weights()
            engine.step()
            return float(engine.get_global_grad_norm()), bool(engine.was_step_applied())
        except Exception as error:
            raise HalfUpdatedError(f"the optimiser failed: {type(error).__name__}: {error}") from error

    def _move_replicated_weights(self) -> tuple[float, bool]:
        """Stage 0, where DeepSpeed steps whatever the gradients are, and says no norm."""
        grads = [p.grad for p in self._trained().parameters.values() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)).double()
        grad_norm = float(norms.square().sum().sqrt())
        stepped = math.isfinite(grad_norm)
        if stepped:
            self._engine.step()
        else:
            self._engine.zero_grad()
        return grad_norm, stepped

    def _count(self, stepped: bool, loss: float, grad_norm: float) -> None:
        if stepped:
            self.num_steps += 1
            self.num_nonfinite = 0
            return
        self.num_nonfinite += 1
        note_skipped(loss, grad_norm, self.num_nonfinite, self.spec.training.max_nonfinite_steps)
