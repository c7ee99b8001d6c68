"""The `torch` training back-end: one rank of a trainer, in any role.

    batch -> passes, one per micro-batch: network -> log-probs or values -> loss -> backward (gradients add up)
          -> global gradient norm -> AdamW on the master weights -> network

A reference has neither gradients nor an optimizer.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import cached_property

from torch import Tensor

from roll.config.training import should_trim_heap
from roll.errors import UnsupportedError
from roll.protocols import LossFn, WeightSource
from roll.training.adapter_snapshot import (
    AdapterSnapshot,
    AdapterSpec,
    build_state,
    create_snapshot,
    take_snapshot,
)
from roll.training.adapters import AdapterStore, Progress
from roll.training.distributed import shard
from roll.training.language_rank import LanguageModelRank
from roll.training.memory.activation_checkpointing import tile_mlps
from roll.training.memory.deferred_weights import DeferredWeights
from roll.training.memory.malloc_trim import Heap, trim_heap_after_layers
from roll.training.memory.snapshots import Snapshots
from roll.training.network.fp8 import check_fp8_support
from roll.training.network.loading import build_network
from roll.training.network.lora import AdapterScales, reset_magnitudes
from roll.training.network.pipeline_split import check_split, reduce_tied_gradients, split_into_stages
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork
from roll.training.network.vision_parts import compute_learning_rate_factors
from roll.training.network.weights import TrainerWeights, collect_adapters, gather_weight
from roll.training.parallel.fsdp import reshard_after_forward, set_first_backward_layer
from roll.training.passes import PassRunner
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec
from roll.training.torch_rank import TorchRank
from roll.types import OptimParams, TrainingBatch

__all__ = ["TorchBackend"]

DEFAULT_ADAPTER = "default"
"""The name of a trainer's first adapter."""


class TorchBackend(TorchRank[TrainingBatch, LossFn], LanguageModelRank):
    """The `torch` back-end of a trainer rank. See `LanguageModelRank`.

    The role decides which calls and outputs are supported: a reference cannot be trained, and `forward` computes the
    outputs of the role's network. Other calls raise `UnsupportedError`.

    Args:
        spec: The spec of the rank.
        precision: Overrides the model's dtype; for tests in float64.

    Raises:
        ModelError: The model cannot be loaded, its architecture cannot be packed, or the device does not support the
            configured FP8 matmuls.
    """

    def __init__(self, spec: TrainerSpec, *, precision: Precision | None = None) -> None:
        super().__init__(spec)
        self.precision = precision or Precision.from_name(spec.model.dtype)
        if spec.role == "reference":
            # A reference is never updated, so it needs no float32 master weights.
            self.precision = Precision(compute=self.precision.compute, master=self.precision.compute)
        if spec.training.fp8 != "none":
            check_fp8_support(self.device)
        self.network = self._build()
        self.model = self.network.root
        if spec.training.tiled_mlp_tokens is not None:
            tile_mlps(self.network, spec.training.tiled_mlp_tokens)
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        heads = self.network.heads if isinstance(self.network, PolicyNetwork) else {}
        copies = self.network.pipeline_split.copies if self.network.pipeline_split is not None else ()
        factors = dict.fromkeys(heads, self.head_factor)
        factors |= compute_learning_rate_factors(self.model, spec.model.vision, trainable)
        self._prepare_updates(trainable | heads, factors, copies)
        self._adapters = (
            AdapterStore(self.masters, self.optimizer, DEFAULT_ADAPTER, AdapterScales(self.model).set)
            if spec.model.lora is not None
            else None
        )
        self._adapter_specs: dict[str, AdapterSpec] = {}
        """The specs of the adapters that `put_adapter` has created, by name."""
        self._heap: Heap | None = None
        if self.device.type == "cpu" and should_trim_heap(spec.model, spec.training, self.ranks.size):
            decoder = self.network.decoder
            self._heap = trim_heap_after_layers(getattr(decoder, "layers", ()), decoder.get_input_embeddings())
        self._passes = PassRunner(spec, self.network, self.ranks, self.device, self._random_states)

    def _build(self) -> PolicyNetwork | ValueNetwork:
        """Build the network. With several ranks, each rank reads only its own part of the weights."""
        spec, ranks, dtype = self.spec, self.ranks, self.precision.compute
        if ranks.size == 1:
            return build_network(spec, dtype).to(self.device)
        in_4_bits = spec.model.lora is not None and spec.model.lora.base == "nf4"  # weights to quantize are read whole
        deferred = DeferredWeights()
        network = build_network(spec, dtype, None if in_4_bits else deferred)
        if ranks.stage is not None:
            # The check runs the network, so it precedes the split, after which no rank has all layers.
            with deferred.materialize_weights():
                check_split(network, ranks.stage)
            split_into_stages(network, ranks.stage, ranks.share, dtype)
        # Tensors that no file contains, such as adapters and value heads, have data already; `fill` reads the others.
        for tensor in (*network.parameters(), *network.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)
        if ranks.mesh is not None:
            shard(network, ranks, self.precision)
        deferred.read_shards(network, self.device)
        reset_magnitudes(network.root)
        return network

    def weights(self) -> WeightSource:
        adapted, is_first = self.spec.model.lora is not None, self.ranks.is_first
        return TrainerWeights.from_network(self.network, adapted=adapted, dtype=self.engine_dtype, is_first=is_first)

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        self._check_trained("keeps no snapshots")
        reshard_after_forward(self.network)
        self._snapshots.store(version, versions)

    def _use_snapshot(self, version: int) -> AbstractContextManager[None]:
        reshard_after_forward(self.network)
        return self._snapshots.activate(version)

    @cached_property
    def _snapshots(self) -> Snapshots:
        """Snapshots of all tensors that an update changes in the network, except a value head, which does not affect
        log-probs.
        """
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        biases = {f"router bias {i}": bias for i, bias in enumerate(self._router_biases)}
        return Snapshots(trained | biases, self.precision.compute)

    def use_adapter(self, name: str) -> None:
        if self._adapters is None:
            super().use_adapter(name)
            return
        self._check_trained("has no adapters")
        reshard_after_forward(self.network)
        now = Progress(
            num_steps=self.num_steps,
            num_nonfinite=self.num_nonfinite,
            has_gradients=self._has_gradients,
            summed_loss=self._summed_loss,
        )
        then = self._adapters.activate(name, now)
        self.num_steps, self.num_nonfinite = then.num_steps, then.num_nonfinite
        self._has_gradients, self._summed_loss = then.has_gradients, then.summed_loss

    def put_adapter(self, name: str, content: AdapterSpec | AdapterSnapshot) -> None:
        """Create an adapter, or replace its weights, gradients and optimizer state; see `TrainBackend.use_adapter`.

        Args:
            name: The name of the adapter.
            content: The spec of a new adapter, or a snapshot of one.

        Raises:
            ModelError: The content does not fit the network; nothing has changed.
            UnsupportedError: The trainer has no adapters, or its weights are split over pp, tp or ep.
        """
        store, adapters = self._get_adapter_store(name), collect_adapters(self.network)
        assert self.spec.model.lora is not None
        if isinstance(content, AdapterSpec):
            content = create_snapshot(content, adapters, self.masters)
        state = build_state(content, adapters, self.masters, self.spec.model.lora.rank)
        if store.current == name:
            self.use_adapter(DEFAULT_ADAPTER)
        store.put(name, state)
        self._adapter_specs[name] = content.spec

    def read_adapter(self, name: str) -> AdapterSnapshot:
        """Return a copy of an adapter that `put_adapter` has created."""
        self._get_adapter_store(name)
        self.use_adapter(name)
        adapters = collect_adapters(self.network)
        return take_snapshot(self._adapter_specs[name], adapters, self.masters, self.optimizer, self.num_steps)

    def delete_adapter(self, name: str) -> None:
        """Delete an adapter that `put_adapter` has created."""
        store = self._get_adapter_store(name)
        if store.current == name:
            self.use_adapter(DEFAULT_ADAPTER)
        store.delete(name)
        self._adapter_specs.pop(name, None)

    def _get_adapter_store(self, name: str) -> AdapterStore:
        if self._adapters is None or self.ranks.stage is not None or name == DEFAULT_ADAPTER:
            lacks = "has no model.lora" if self._adapters is None else "has several pipeline stages"
            reason = "the name is reserved" if name == DEFAULT_ADAPTER else f"the trainer {lacks}"
            raise UnsupportedError(f"adapter '{name}' cannot be created, read or deleted: {reason}")
        return self._adapters

    def _read(self, name: str) -> Tensor:
        own, split = dict(self.model.named_parameters()), self.network.pipeline_split
        return own[name] if split is None else split.send_to_first(name, gather_weight(split.gather_tensors(own)[name]))

    @property
    def _saved_buffers(self) -> list[Tensor]:
        return self._router_biases

    @property
    def _router_biases(self) -> list[Tensor]:
        """The biases of MoE routers (`e_score_correction_bias`), which are updated without gradients."""
        routing = self.network.routing if isinstance(self.network, PolicyNetwork) else None
        return [] if routing is None else routing.biases

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        split = self.network.pipeline_split
        if split is not None and split.stage.num_chunks > 1:
            set_first_backward_layer(
                self.network, self.network.decoder.layers[split.layers[split.stage.active_index][-1]]
            )
        super()._backward(loss, last=last)

    def _compute_grad_norm(self) -> float:
        if self.network.pipeline_split is not None:
            # Before the norm: tied embeddings have a part of their gradient in the first stage and another in the last.
            reduce_tied_gradients(self.network.pipeline_split, self.masters)
        return super()._compute_grad_norm()

    def _step_optimizer(self, learning_rate: float, grad_norm: float, params: OptimParams) -> None:
        super()._step_optimizer(learning_rate, grad_norm, params)
        if self.spec.training.router_bias_rate and isinstance(self.network, PolicyNetwork):
            assert self.network.routing is not None
            self.network.routing.update_biases(self.spec.training.router_bias_rate)
        if self._heap is not None:
            self._heap.trim_if_fragmented(ignore_peak=True)  # generation or gathering of whole weights follows
