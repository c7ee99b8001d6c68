"""The `torch` train back-end: one rank of a trainer, in any role.

    batch -> passes, one per micro-batch: network -> log-probs or values -> loss -> backward (gradients add up)
          -> global gradient norm -> AdamW on the master weights -> network

A reference has neither gradients nor an optimizer.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from torch import Tensor

from roll.config.training import trims_heap
from roll.protocols import StateKind, WeightSource
from roll.training.adapters import AdapterStates, Progress
from roll.training.checkpoint.state import collect_state, load_state, write_entries
from roll.training.checkpoint.writer import StateWriter
from roll.training.distributed import shard
from roll.training.memory.activation_checkpointing import tile_mlps
from roll.training.memory.deferred_weights import DeferredWeights
from roll.training.memory.host_memory import HostMemory
from roll.training.memory.malloc_trim import Heap, trim_heap_after
from roll.training.memory.snapshots import Snapshots
from roll.training.network.fp8 import check_fp8_support
from roll.training.network.loading import build_network
from roll.training.network.pipeline_split import check_split, reduce_tied_gradients, split_into_stages
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork
from roll.training.network.weights import TrainerWeights, gather_weight
from roll.training.offload import StatePlacement
from roll.training.optimizer import Optimizer
from roll.training.parallel.fsdp import reshard_after_forward, set_first_backward_layer
from roll.training.passes import Passes
from roll.training.precision import MasterWeights, Precision
from roll.training.rank import TrainerRank
from roll.training.spec import TrainerSpec
from roll.types import OptimParams

__all__ = ["TorchBackend"]

DEFAULT = "default"
"""The name of a trainer's first adapter."""


class TorchBackend(TrainerRank):
    """The `torch` back-end. See `TrainerRank`.

    `train_step` is for policies and critics; the outputs of `forward` depend on the role's network. Other calls raise
    `UnsupportedError`.

    Args:
        spec: The spec of the rank.
        precision: Overrides the model's dtype; for tests in float64.

    Raises:
        ModelError: the model cannot be loaded, its architecture cannot be packed, or the device does not support the
            configured FP8 products.
    """

    def __init__(self, spec: TrainerSpec, *, precision: Precision | None = None) -> None:
        super().__init__(spec)
        self.precision = precision or Precision.of(spec.model.dtype)
        if spec.role == "reference":
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
        memory = HostMemory(self.device) if spec.training.offload_optimizer else None
        self.masters = MasterWeights(trainable | heads, self.precision, copies, memory)
        factors = dict.fromkeys(heads, self.head_factor)
        self.optimizer = Optimizer(self.masters, spec.training, self.ranks, factors)
        self.placement = StatePlacement(self.network, self.masters, self.optimizer, self.device)
        self._adapters = AdapterStates(self.masters, self.optimizer, DEFAULT) if spec.model.lora is not None else None
        self._heap: Heap | None = None
        if self.device.type == "cpu" and trims_heap(spec.model, spec.training, self.ranks.size):
            decoder = self.network.decoder
            self._heap = trim_heap_after(getattr(decoder, "layers", ()), decoder.get_input_embeddings())
        self._writer = StateWriter(self.ranks)
        self._passes = Passes(spec, self.network, self.ranks, self.device, self._randomness)

    def _build(self) -> PolicyNetwork | ValueNetwork:
        """Build the network. With several ranks, each reads only its own part of the weights."""
        spec, ranks, dtype = self.spec, self.ranks, self.precision.compute
        if ranks.size == 1:
            return build_network(spec, dtype).to(self.device)
        in_4_bits = spec.model.lora is not None and spec.model.lora.base == "nf4"  # weights to quantize are read whole
        unread = DeferredWeights()
        network = build_network(spec, dtype, None if in_4_bits else unread)
        if ranks.stage is not None:
            with unread.materialized():
                check_split(network, ranks.stage)
            split_into_stages(network, ranks.stage, ranks.share, dtype)
        for tensor in (*network.parameters(), *network.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)
        if ranks.mesh is not None:
            shard(network, ranks, self.precision)
        unread.fill(network, self.device)
        return network

    def weights(self) -> WeightSource:
        adapted, is_first = self.spec.model.lora is not None, self.ranks.is_first
        return TrainerWeights.of(self.network, adapted=adapted, dtype=self.engine_dtype, is_first=is_first)

    def save(self, path: Path, *, background: bool = False) -> None:
        self._writer.finish()
        state = collect_state(
            self.masters, self.optimizer, self._counters(), self.ranks, self._randomness, self._biases
        )
        if background:
            self._writer.begin(path, state)
        else:
            write_entries(path, state, self.ranks)

    def is_save_written(self, *, wait: bool) -> bool:
        """Return whether the last save is on disk.

        Raises:
            CheckpointError: a background write failed; raised once.
        """
        if wait or self._writer.is_done:
            self._writer.finish()
        return self._writer.is_done

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        self._check_trained("keeps no snapshots")
        reshard_after_forward(self.network)
        self._snapshots.keep(version, versions)

    def _with_snapshot(self, version: int) -> AbstractContextManager[None]:
        reshard_after_forward(self.network)
        return self._snapshots.activate(version)

    @cached_property
    def _snapshots(self) -> Snapshots:
        """Snapshots of all tensors that an update changes in the network, except a value head, which does not affect
        log-probs."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        biases = {f"router bias {i}": bias for i, bias in enumerate(self._biases)}
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
        then = self._adapters.use(name, now)
        self.num_steps, self.num_nonfinite = then.num_steps, then.num_nonfinite
        self._has_gradients, self._summed_loss = then.has_gradients, then.summed_loss

    def offload(self, states: Collection[StateKind]) -> None:
        if "optimizer" in states:
            self._has_gradients, self._summed_loss = False, 0.0
        self.placement.offload(states)

    def onload(self, states: Collection[StateKind]) -> None:
        self.placement.onload(states)

    def _read(self, name: str) -> Tensor:
        own, part = dict(self.model.named_parameters()), self.network.pipeline_split
        return own[name] if part is None else part.send_to_first(name, gather_weight(part.all_tensors(own)[name]))

    def _load(self, path: Path) -> dict[str, int]:
        parts = self.masters, self.optimizer, self._counters(), self.ranks, self._randomness
        return load_state(path, *parts, self.spec.seed, self._biases)

    @property
    def _biases(self) -> list[Tensor]:
        """The biases of a mixture's routers, which are not updated by gradients."""
        routing = self.network.routing if isinstance(self.network, PolicyNetwork) else None
        return [] if routing is None else routing.biases

    def _clear_grads(self) -> None:
        self.masters.clear_grads()

    def _check_params(self, params: OptimParams, scale: float) -> None:
        """Accept any parameters: this back-end can change all of them from one update to the next."""

    def _scale_grads(self, scale: float) -> None:
        self.masters.scale_grads(scale)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        part = self.network.pipeline_split
        if part is not None and part.stage.num_chunks > 1:
            set_first_backward_layer(
                self.network, self.network.decoder.layers[part.layers[part.stage.active_index][-1]]
            )
        super()._backward(loss, last=last)

    def _grad_norm(self) -> float:
        if self.network.pipeline_split is not None:
            reduce_tied_gradients(self.network.pipeline_split, self.masters)
        return self.optimizer.grad_norm()

    def _move_weights(self, rate: float, grad_norm: float, params: OptimParams) -> None:
        self.optimizer.step(rate, grad_norm, params)
        if self.spec.training.router_bias_rate and isinstance(self.network, PolicyNetwork):
            assert self.network.routing is not None
            self.network.routing.update_biases(self.spec.training.router_bias_rate)
        if self._heap is not None:
            self._heap.trim_if_fragmented(beyond_now=True)  # generation or gathering of whole weights follows
