"""The `torch` train back-end: one rank of a trainer, in any role.

    samples -> pack -> this rank's micro-batches, one after the other:
                           network -> log-probs or values -> loss -> backward (gradients add up)
            -> global gradient norm -> AdamW on the master weights -> network

Invariants: a micro-batch's loss is already its share of the batch's loss, so nothing divides by the number of
micro-batches or ranks; every rank runs the same number of micro-batches, and every one of them goes back through the
same outputs of the network; a step whose gradients are not finite changes nothing. A reference has neither gradients
nor an optimiser.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.errors import HalfUpdatedError, TrainingDivergedError, UnsupportedError
from roll.protocols import LossFn, StateKind, WeightSource
from roll.training.attention_maps import MapObserver, observed_layers
from roll.training.blocks import Block
from roll.training.by_sample import collect, collect_top, complete, in_order, merged
from roll.training.distributed import Ranks, combine, default_num_threads, pick_device, reshard, shard
from roll.training.distributions import Predictions
from roll.training.export import export_adapter, export_model
from roll.training.layout import Int64Array, PackedLayout, build_layout, idle_layout
from roll.training.loading import build_network
from roll.training.lora import adapters_off, find_adapters
from roll.training.loss_inputs import loss_inputs, teacher_top_ids
from roll.training.offload import StatePlacement
from roll.training.optimizer import Optimizer
from roll.training.packing import pack, pack_by_teacher
from roll.training.policy import PolicyNetwork
from roll.training.precision import MasterWeights, Precision
from roll.training.randomness import Randomness
from roll.training.routing import load_metrics
from roll.training.schedule import Schedule
from roll.training.spec import TrainerSpec
from roll.training.state import load_state, save_state
from roll.training.weights import TrainerWeights, persistent_buffers
from roll.types import (
    AttentionRange,
    FloatArray,
    Needs,
    Output,
    Outputs,
    StepResult,
    TrainingBatch,
    TrainingSample,
)

__all__ = ["TorchBackend"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GIVEN_BY: dict[Output, str] = {
    "logprobs": "policy or reference",
    "values": "critic or a policy with a value head",
    "attention": "policy",
    "top_logprobs": "policy or reference",
    "experts": "policy that is a mixture of experts",
}


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
        self.network = build_network(spec, self.precision.compute).to(self.device)
        self.model = self.network.root
        if self.ranks.mesh is not None:
            shard(self.network, self.ranks, self.precision)
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        heads = self.network.heads if isinstance(self.network, PolicyNetwork) else {}
        self.masters = MasterWeights(trainable | heads, self.precision)
        rate = spec.value_head_learning_rate or self.schedule.peak
        self.optimizer = Optimizer(
            self.masters, spec.training, self.ranks, dict.fromkeys(heads, rate / self.schedule.peak)
        )
        self.placement = StatePlacement(self.network, self.masters, self.optimizer, self.device)
        self._randomness = Randomness(spec.seed + self.ranks.data_rank, self.device)
        self.num_steps = 0
        """Optimiser steps that moved the weights."""
        self.num_nonfinite = 0
        """Steps in a row whose gradients were not finite."""

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """All micro-batches and one optimiser step.

        Raises:
            ValueError: no token of the batch is in the loss, or a sample lacks what the loss needs.
            TrainingDivergedError: gradients were not finite `training.max_nonfinite_steps` times in a row.
        """
        if self.spec.role == "reference":
            raise UnsupportedError("a trainer with role 'reference' has no train_step: ask a policy or critic")
        if batch.num_loss_tokens == 0:
            raise ValueError("a training batch needs at least one token that the loss counts")
        started = time.perf_counter()
        self.masters.clear_grads()
        self.network.train()
        with self._randomness.untouched_by_errors():
            found = self._losses(batch, loss, learn=True)
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
        if batch.num_loss_tokens == 0:
            raise ValueError("a batch needs at least one token that the loss counts")
        self.network.eval()
        found = self._losses(batch, loss, learn=False)
        reshard(self.network)
        return found

    def _losses(self, batch: TrainingBatch, loss: LossFn, *, learn: bool) -> StepResult:
        """A batch's loss and metrics over all micro-batches and ranks; with `learn` also its gradient."""
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        logprobs: dict[int, FloatArray] = {}
        num_tokens = 0
        needs = loss.needs
        routing = self.network.routing if isinstance(self.network, PolicyNetwork) else None
        if routing is not None:
            routing.clear()
        observed = needs.attention if any(s.attention is None for s in batch.samples) else None
        for teacher, blocks in self._share(batch.samples, every_token=False, needs=needs):
            layout = _layout(blocks, every_token=False, teacher=teacher, shared=not needs.top_logprobs)
            observer = self._observer(blocks, observed)
            top = teacher_top_ids(layout, batch) if needs.top_logprobs else None
            predicted = self._predict(layout, batch, needs, observer, top)
            if not layout.spans:
                if learn:
                    _nothing_of(predicted).backward()
                continue
            attention = observer.results() if observer is not None else None
            outputs = loss(loss_inputs(layout, batch, predicted, attention))
            if learn:
                (outputs.loss * self.ranks.data_size).backward()
            combine(sums, {"loss": outputs.loss.detach(), **outputs.metrics}, torch.add)
            combine(maxima, outputs.maxima, torch.maximum)
            if predicted.logprobs is not None:
                collect(logprobs, layout, batch, predicted.logprobs)
            num_tokens += layout.num_tokens
        metrics = self.ranks.reduce(sums, operator.add)
        if routing is not None:
            metrics |= load_metrics(self.ranks.gather(routing.load()))
        tokens = self.ranks.gather(num_tokens)
        everything = merged(self.ranks.gather(logprobs))
        return StepResult(
            loss=metrics.pop("loss"),
            num_tokens=sum(tokens),
            num_loss_tokens=batch.num_loss_tokens,
            metrics=metrics,
            maxima=self.ranks.reduce(maxima, max),
            logprobs=tuple(in_order(everything, batch)) if "logprobs" in self.network.outputs else (),
        )

    @torch.no_grad()
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
        self._check_outputs(outputs, attention, num_top)
        top = num_top if "top_logprobs" in outputs else None
        needs = Needs(values="values" in outputs)
        every_token = "logprobs" in outputs
        found: dict[Output, dict[int, Any]] = {name: {} for name in outputs}
        self.network.eval()
        with contextlib.nullcontext() if adapter else adapters_off(self.model):
            for _, blocks in self._share(batch.samples, every_token=every_token, needs=needs):
                layout = _layout(blocks, every_token=every_token)
                observer = self._observer(blocks, attention if "attention" in found else None)
                predicted = self._predict(layout, batch, needs, observer, top)
                for name, tensor in (("logprobs", predicted.logprobs), ("values", predicted.values)):
                    if name in found and tensor is not None:
                        collect(found[name], layout, batch, tensor)
                if top is not None:
                    collect_top(found["top_logprobs"], layout, batch, predicted)
                if "experts" in found and isinstance(self.network, PolicyNetwork) and self.network.routing is not None:
                    self.network.routing.by_sample(found["experts"], blocks, batch)
                if observer is not None:
                    found["attention"] |= observer.results()
            reshard(self.network)
        parts = self.ranks.gather(found)
        said: dict[Output, list[Any]] = {n: in_order(merged([part[n] for part in parts]), batch) for n in found}
        complete(said, batch, every_token=every_token, num_top=top)
        return said

    def weights(self) -> WeightSource:
        """All weights: adapters merged, the model's dtype, HF names. For a policy, what the engines must hold."""
        parameters = dict(self.model.named_parameters()) | persistent_buffers(self.model)
        return TrainerWeights(
            names=list(parameters),
            read=parameters.__getitem__,
            adapters=find_adapters(self.model) if self.spec.model.lora else {},
            dtype=self.engine_dtype,
            is_first=self.ranks.is_first,
            model=self.model if isinstance(self.network, PolicyNetwork) else self.network.decoder,
        )

    def save(self, path: Path) -> None:
        """Write everything needed to go on below `path`, an empty or missing directory; fsynced."""
        save_state(path, self.masters, self.optimizer, self._counters(), self.ranks, self._randomness)

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also under another number of ranks.

        Raises:
            CheckpointError: it is incomplete, damaged, or of another model.
        """
        parts = self.masters, self.optimizer, self._counters(), self.ranks, self._randomness
        counters = load_state(path, *parts, self.spec.seed)
        self.num_steps, self.num_nonfinite = counters["num_steps"], counters["num_nonfinite"]

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads; a critic as a token classifier.

        Adapters are merged into it; a policy's and a reward model's are written once more on their own, as `adapter/`
        beside it.
        """
        spec, dtype, is_first = self.spec, self.engine_dtype, self.ranks.is_first
        trust, source = spec.model.trust_remote_code, spec.model_path
        export_model(path, self.weights(), self.network, source, dtype, trust_remote_code=trust, is_first=is_first)
        if spec.model.lora is not None and spec.role in ("policy", "reward_model"):
            read, adapters = dict(self.model.named_parameters()).__getitem__, find_adapters(self.model)
            beside, base, scores = path.with_name("adapter"), spec.model.path, spec.role == "reward_model"
            export_adapter(beside, read, adapters, spec.model.lora, base, dtype, scores_texts=scores, is_first=is_first)

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

    def _check_outputs(self, outputs: Outputs, attention: AttentionRange | None, num_top: int | None) -> None:
        for name in outputs:
            if name not in self.network.outputs:
                raise UnsupportedError(f"a trainer with role '{self.spec.role}' has no {name}: ask a {_GIVEN_BY[name]}")
        if "attention" in outputs and attention is None:
            raise ValueError("what attention says depends on distances: give `attention`, the range that counts")
        if "top_logprobs" in outputs and (num_top is None or num_top < 1):
            raise ValueError(f"the likeliest tokens are asked for, with num_top {num_top}: give a number from 1 on")

    def _predict(
        self,
        layout: PackedLayout,
        batch: TrainingBatch,
        needs: Needs,
        observer: MapObserver | None,
        top: Int64Array | int | None,
    ) -> Predictions:
        """What the network says of a micro-batch."""
        with self._randomness.own():
            return self.network(layout, batch.temperature, needs, observer, top)

    def _counters(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_nonfinite": self.num_nonfinite}

    def _observer(self, blocks: Sequence[Block], of: AttentionRange | None) -> MapObserver | None:
        """Of a micro-batch's attention, where something wants to know of it."""
        if of is None or not isinstance(self.network, PolicyNetwork):
            return None
        return MapObserver(blocks, observed_layers(self.network.num_layers), of, self.device)

    def _share(
        self, samples: Sequence[TrainingSample], *, every_token: bool, needs: Needs
    ) -> list[tuple[int, tuple[Block, ...]]]:
        """This rank's micro-batches, each with its teacher's number; as many as every other rank's."""
        config, rank = self.spec.training, self.ranks.data_rank
        settings: dict[str, Any] = {
            "max_tokens": config.max_tokens_per_micro_batch,
            "share_prefix": config.share_prefix,
            "num_ranks": self.ranks.data_size,
            "every_token": every_token,
            "whole_units": needs.whole_units,
            "whole_sequences": needs.whole_sequences,
        }
        if needs.divergence is not None:
            return pack_by_teacher(samples, **settings)[rank]
        return [(0, blocks) for blocks in pack(samples, **settings)[rank]]

    def _move_weights(self, loss: float, grad_norm: float, rate: float) -> bool:
        """Whether the optimiser made its step: not where loss or gradients are not finite."""
        if bool(np.isfinite(grad_norm)) and bool(np.isfinite(loss)):
            try:
                self.optimizer.step(rate, grad_norm)
            except Exception as error:
                raise HalfUpdatedError(f"the optimiser failed: {type(error).__name__}: {error}") from error
            self.num_steps += 1
            self.num_nonfinite = 0
            return True
        self.num_nonfinite += 1
        limit = self.spec.training.max_nonfinite_steps
        logger.warning("step skipped: loss %s, gradient norm %s (%d in a row)", loss, grad_norm, self.num_nonfinite)
        if self.num_nonfinite >= limit:
            raise TrainingDivergedError(
                f"loss {loss} or gradient norm {grad_norm} was not finite, {self.num_nonfinite} steps in a row. "
                "Lower training.learning_rate, or raise training.max_nonfinite_steps."
            )
        return False


def _layout(blocks: Sequence[Block], *, every_token: bool, teacher: int = 0, shared: bool = True) -> PackedLayout:
    """A micro-batch; one without blocks takes part for the other ranks' sake."""
    if not blocks:
        return idle_layout(teacher=teacher)
    return build_layout(blocks, every_token=every_token, teacher=teacher, shared_predictions=shared)


def _nothing_of(predicted: Predictions) -> Tensor:
    """A loss of 0 through every output of the network: ranks with work have a gradient for each, and FSDP reduces
    gradients of those parameters alone that have one."""
    return torch.stack([0.0 * tensor.sum() for tensor in predicted.tensors]).sum()
