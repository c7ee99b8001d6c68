"""Forward and backward passes of a batch through one rank's network, for every role and back-end.

    samples -> pack -> this rank's micro-batches, one after the other:
                           network -> log-probs or values -> loss -> backward
            -> collected by sample, reduced over the ranks

With pipeline stages, several micro-batches are in flight at once (`parallel.pipeline_schedule`), and their outputs come
from the last model chunk.

The back-end shards the weights, reduces the gradients and updates the weights. Every rank runs the same number of
micro-batches, and every micro-batch backpropagates through the same network outputs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from roll.errors import DataError, UnsupportedError, shorten
from roll.models.transfers import read_results
from roll.protocols import LossFn
from roll.training.attention.maps import AttentionMapObserver, select_observed_layers
from roll.training.batch_check import check_batch
from roll.training.distributed import Ranks, merge_metrics
from roll.training.memory.activation_offload import ActivationOffloader
from roll.training.network.distributions import Predictions
from roll.training.network.lora import disable_adapters
from roll.training.network.loss_inputs import build_loss_inputs, collect_teacher_top_ids
from roll.training.network.media import add_positions
from roll.training.network.policy import PolicyNetwork
from roll.training.network.routing import Routing
from roll.training.network.sample_outputs import (
    collect_topk,
    fill_missing_outputs,
    merge_outputs,
    order_outputs,
    split_by_sample,
)
from roll.training.network.value import ValueNetwork
from roll.training.packing.blocks import Block
from roll.training.packing.division import RankShare
from roll.training.packing.layout import Int64Array, PackedLayout, build_idle_layout, build_layout, pad_layout
from roll.training.packing.micro_batches import MicroBatch, select_micro_batches
from roll.training.parallel.fsdp import reshard_after_forward
from roll.training.parallel.pipeline_schedule import Action, build_schedule
from roll.training.random_states import RandomStates
from roll.training.results import PassResults
from roll.training.spec import TrainerSpec
from roll.types import (
    AttentionRange,
    BatchCounts,
    ForwardBackwardResult,
    ForwardOptions,
    LossRequirements,
    OutputName,
    Outputs,
    TrainingBatch,
)

__all__ = ["BackwardFn", "PassRunner"]

_ROLES_WITH_OUTPUT: dict[OutputName, str] = {
    "logprobs": "policy or reference",
    "values": "critic or a policy with a value head",
    "attention": "policy",
    "top_logprobs": "policy or reference",
    "experts": "policy that is a mixture of experts",
}


class BackwardFn(Protocol):
    """A back-end's backward pass of a micro-batch's loss."""

    def __call__(self, loss: Tensor, *, last: bool) -> None:
        """Backpropagate the scalar `loss` and accumulate the gradients.

        `last` is true for the last micro-batch before the optimizer update.
        """


class PassRunner:
    """Runs batches through one rank's network.

    Args:
        spec: The spec of the rank.
        network: The network.
        ranks: The ranks that share the work.
        device: The device of the network.
        random_states: The random generators of the rank.
        call: A function to call instead of the network, if a library has wrapped the network.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        network: PolicyNetwork | ValueNetwork,
        ranks: Ranks,
        device: torch.device,
        random_states: RandomStates,
        *,
        call: Callable[..., Predictions] | None = None,
    ) -> None:
        self._spec = spec
        self._network = network
        self._ranks = ranks
        self._device = device
        self._random_states = random_states
        self._call = call or network
        self._saved = ActivationOffloader(network, device) if spec.training.offload_activations else None
        self.share = RankShare(
            data_rank=ranks.data_rank,
            data_size=ranks.data_size,
            computes_loss=ranks.stage is None or ranks.stage.number == ranks.stage.count - 1,
            max_tokens=spec.training.max_tokens_per_micro_batch,
            share_prefix=spec.training.share_prefix,
        )

    def compute_losses(
        self,
        batch: TrainingBatch,
        loss: LossFn,
        backward: BackwardFn | None = None,
        *,
        counts: BatchCounts | None = None,
        last: bool = True,
    ) -> ForwardBackwardResult:
        """Return a batch's loss and metrics over all micro-batches and ranks; also run `backward`, if given.

        Args:
            batch: The samples.
            loss: The loss function.
            backward: A function that runs the backward pass of each micro-batch's loss.
            counts: The counts by which the loss is divided; by default the counts of the batch.
            last: True if this is the last batch before the update.

        Raises:
            ValueError: No token of the batch is in the loss, and `counts` is not given, or a sample lacks an input of
                the loss.
            ModelError: A sample has a token ID or an expert index that is out of the model's range.
        """
        batch = self._prepare(batch)
        if batch.num_loss_tokens == 0:
            if counts is None:
                raise ValueError("a batch must have at least one loss token, but all its loss masks are 0")
            return ForwardBackwardResult(loss=0.0, num_tokens=0, num_loss_tokens=0)
        counts = counts or batch.counts
        stage, routing = self._ranks.stage, self._routing
        share = self._build_micro_batches(batch, every_token=False, needs=loss.needs)
        if routing is not None:
            routing.clear()
            if backward is not None and routing.aux_coefficient:
                self._prepare_load_balancing_loss(routing, share, batch.temperature)
        results, waiting = PassResults(), dict[tuple[int, int], Any]()
        for action in self._list_actions(len(share), backward=backward is not None):
            place = action.chunk, action.micro_batch
            if action.is_forward:
                waiting[place] = self._compute_loss(share[action.micro_batch], batch, loss, counts, results)
                continue
            assert backward is not None
            # The chunks of a rank run backward in descending order, so its first chunk ends the step.
            is_last = last and place == (0, len(share) - 1)
            own, go_back = waiting.pop(place), functools.partial(backward, last=is_last)
            if stage is not None:
                stage.backward(own, go_back)
            else:
                go_back(own)
        return self._build_result(batch, results)

    def _compute_loss(
        self,
        micro_batch: MicroBatch,
        batch: TrainingBatch,
        loss: LossFn,
        counts: BatchCounts,
        results: PassResults,
    ) -> Tensor | None:
        """Compute the loss of a micro-batch and add its results to `results`; return `None` if the active chunk has no
        loss.
        """
        needs = loss.needs
        observed = needs.attention if any(s.attention is None for s in batch.samples) else None
        # For a shared token, each sample may have top-k tokens of its own.
        layout = self._build_layout(micro_batch, shared_predictions=not needs.top_logprobs)
        observer = self._build_observer(micro_batch.blocks, observed)
        top = collect_teacher_top_ids(layout, batch) if needs.top_logprobs else None
        predicted = self._predict(layout, batch, needs, observer, top)
        if predicted.hidden is not None:
            return None
        if not layout.spans:
            return _build_zero_loss(predicted)
        attention = observer.compute_statistics() if observer is not None else None
        outputs = loss(build_loss_inputs(layout, batch, predicted, counts, attention))
        merge_metrics(results.sums, {"loss": outputs.loss.detach(), **outputs.metrics}, torch.add)
        merge_metrics(results.maxima, outputs.maxima, torch.maximum)
        if predicted.logprobs is not None:
            results.logprobs.append((layout, predicted.logprobs.detach()))
        results.num_tokens += layout.num_tokens
        return outputs.loss

    def _build_result(self, batch: TrainingBatch, results: PassResults) -> ForwardBackwardResult:
        """Return the result of a batch on every rank, combined from the `results` of the last stage's ranks."""
        ranks, routing = self._ranks, self._routing
        own_metrics, own_maxima, own_logprobs = results.read(batch)
        metrics, maxima = ranks.reduce(own_metrics, operator.add), ranks.reduce(own_maxima, max)
        logprobs, num_tokens = merge_outputs(ranks.gather(own_logprobs)), sum(ranks.gather(results.num_tokens))
        metrics, maxima, logprobs, num_tokens = ranks.gather_stages((metrics, maxima, logprobs, num_tokens))[-1]
        if routing is not None:
            metrics |= routing.compute_metrics(self._gather_loads(routing))
        return ForwardBackwardResult(
            loss=metrics.pop("loss") + metrics.get("experts/aux_loss", 0.0),
            num_tokens=num_tokens,
            num_loss_tokens=batch.num_loss_tokens,
            metrics=metrics,
            maxima=maxima,
            logprobs=tuple(order_outputs(logprobs, batch)) if "logprobs" in self._network.outputs else (),
        )

    @torch.no_grad()
    def forward(self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions) -> dict[OutputName, list[Any]]:
        """Compute outputs for a batch with the current weights, on every rank; see `TrainBackend.forward`.

        Raises:
            UnsupportedError: This role's network does not compute a requested output.
            ModelError: A sample has a token ID or an expert index that is out of the model's range.
            ValueError: `adapter` is false but the policy has no adapter, attention is requested without a range, or
                top-k log-probs are requested without k.
        """
        self._check_outputs(outputs, options)
        attention, num_top = options.attention, options.num_top
        top = num_top if "top_logprobs" in outputs else None
        needs = LossRequirements(values="values" in outputs)
        every_token = "logprobs" in outputs
        results: dict[OutputName, dict[int, Any]] = {name: {} for name in outputs}
        on_device: list[tuple[OutputName, PackedLayout, Tensor]] = []
        routing = self._routing
        batch = self._prepare(batch)
        self._network.eval()
        root, in_stages = self._network.root, self._network.pipeline_split is not None
        with contextlib.nullcontext() if options.adapter else disable_adapters(root, allow_missing=in_stages):
            share = self._build_micro_batches(batch, every_token=every_token, needs=needs)
            for action in self._list_actions(len(share), backward=False):
                blocks = share[action.micro_batch].blocks
                layout = self._build_layout(share[action.micro_batch], every_token=every_token)
                observer = self._build_observer(blocks, attention if "attention" in results else None)
                predicted = self._predict(layout, batch, needs, observer, top)
                for name, tensor in (("logprobs", predicted.logprobs), ("values", predicted.values)):
                    if name in results and tensor is not None:
                        on_device.append((name, layout, tensor))
                if predicted.top_ids is not None:
                    collect_topk(results["top_logprobs"], layout, batch, predicted)
                if routing is not None and "experts" in results:
                    routing.collect_choices(results["experts"], blocks, batch, self._ranks.share)
                if observer is not None:
                    results["attention"] |= observer.compute_statistics()
        rows = read_results([tensor for _, _, tensor in on_device])
        for (name, layout, _), row in zip(on_device, rows, strict=True):
            results[name] |= split_by_sample(row, layout, batch)
        parts = self._ranks.gather(results)
        stages = self._ranks.gather_stages({name: merge_outputs([part[name] for part in parts]) for name in results})
        if "experts" in results:  # each stage has the choices of its own layers
            stages[-1]["experts"] = {
                i: np.maximum.reduce([s["experts"][i] for s in stages]) for i in stages[-1]["experts"]
            }
        ordered: dict[OutputName, list[Any]] = {name: order_outputs(stages[-1][name], batch) for name in results}
        fill_missing_outputs(ordered, batch, every_token=every_token, num_top=top)
        return ordered

    @torch.no_grad()
    def _prepare_load_balancing_loss(self, routing: Routing, batches: Sequence[MicroBatch], temperature: float) -> None:
        """Prepare the auxiliary loss: extra forward passes count how often each expert is chosen in the whole batch.

        The loss depends on the counts of the whole batch, which are not known during a micro-batch.
        """
        was_training = self._network.training
        self._network.eval()
        for action in self._list_actions(len(batches), backward=False):
            with self._random_states.activate():
                layout = self._build_layout(batches[action.micro_batch])
                self._call(layout, temperature, LossRequirements(), None, None)
        routing.set_load_balancing_loss(self._gather_loads(routing))
        routing.clear()
        reshard_after_forward(self._network)
        self._network.train(was_training)

    def _list_actions(self, num_micro_batches: int, *, backward: bool) -> Iterable[Action]:
        """Return this rank's actions for `num_micro_batches` micro-batches, in order."""
        stage = self._ranks.stage
        if stage is None:
            return build_schedule(num_micro_batches, 0, 1, 1, backward=backward)
        return stage.iter_actions(num_micro_batches, backward=backward)

    def _gather_loads(self, routing: Routing) -> list[Any]:
        """Return the expert loads of all data ranks and pipeline stages; a stage's loads cover only its own layers."""
        by_stage = self._ranks.gather_stages(self._ranks.gather(routing.gather_load(self._ranks.share)))
        return [load for stage in by_stage for load in stage]

    @property
    def _routing(self) -> Routing | None:
        return self._network.routing if isinstance(self._network, PolicyNetwork) else None

    def _prepare(self, batch: TrainingBatch) -> TrainingBatch:
        """Check a batch's tokens, and return the batch with the positions of its media."""
        check_batch(batch, self._network.vocab_size, self._routing, self._ranks, self._spec.model_path)
        if not any(sample.media for sample in batch.samples):
            return batch
        return replace(batch, samples=add_positions(self._network.decoder, batch.samples, self._spec.model_path))

    def _check_outputs(self, outputs: Outputs, options: ForwardOptions) -> None:
        for name in outputs:
            if name not in self._network.outputs:
                raise UnsupportedError(
                    f"a trainer with role '{self._spec.role}' does not compute {name}: use a {_ROLES_WITH_OUTPUT[name]}"
                )
        if "attention" in outputs and options.attention is None:
            raise ValueError("attention statistics require a range of token distances: set `attention` in the options")
        if "top_logprobs" in outputs and (options.num_top is None or options.num_top < 1):
            raise ValueError(f"top_logprobs: num_top must be at least 1, got {options.num_top}")

    def _build_layout(self, micro_batch: MicroBatch, **settings: bool) -> PackedLayout:
        """Build the layout of a micro-batch, or an idle layout for collectives if the micro-batch has no blocks."""
        blocks, teacher = micro_batch.blocks, micro_batch.teacher
        layout = build_layout(blocks, teacher=teacher, **settings) if blocks else build_idle_layout(teacher=teacher)
        layout = replace(layout, encodes_media=micro_batch.encodes_media)
        return pad_layout(layout, self._ranks.share.length_multiple)

    def _predict(
        self,
        layout: PackedLayout,
        batch: TrainingBatch,
        needs: LossRequirements,
        observer: AttentionMapObserver | None,
        topk: Int64Array | int | None,
    ) -> Predictions:
        """Run the network on a micro-batch."""
        with (
            self._random_states.activate(),
            contextlib.nullcontext() if self._saved is None else self._saved.offload_saved_tensors(),
        ):
            return self._call(layout, batch.temperature, needs, observer, topk)

    def _build_observer(self, blocks: Sequence[Block], span: AttentionRange | None) -> AttentionMapObserver | None:
        """Return an observer of a micro-batch's attention, or `None` if no range is given."""
        if span is None or not isinstance(self._network, PolicyNetwork):
            return None
        if self._ranks.stage is not None:
            raise UnsupportedError(
                "attention credit does not support pipeline stages: set training.parallel.pp to 1, or choose an "
                "algorithm.credit.type other than local, global or coupled"
            )
        return AttentionMapObserver(
            blocks, select_observed_layers(self._network.num_layers), span, self._device, self._ranks.share
        )

    def _build_micro_batches(
        self, batch: TrainingBatch, *, every_token: bool, needs: LossRequirements
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches; every rank has the same number."""
        share, held = self.share, batch.held
        ranks = share.pack(batch.samples, needs, every_token=every_token, unify_experts=held is None)
        micro_batches = select_micro_batches(ranks, share.data_rank)
        members = (m for micro_batch in micro_batches for block in micro_batch.blocks for m in block.members)
        if held is not None and (missing := next((m for m in members if m.index not in held), None)) is not None:
            raise DataError(
                f"sample {shorten(missing.sample.sample_id)} belongs to data rank {share.data_rank}, whose part of the "
                "batch does not have the sample's columns: restore the batch with the columns of `divide_batch` for "
                "this rank and this call"
            )
        return micro_batches


def _build_zero_loss(predicted: Predictions) -> Tensor:
    """Return a loss of 0 that depends on every output of the network.

    FSDP reduces gradients only for parameters that have a gradient, so a rank without work needs gradients for the same
    parameters as the other ranks.
    """
    return torch.stack([0.0 * tensor.sum() for tensor in predicted.tensors]).sum()
