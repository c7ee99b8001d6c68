"""The `megatron` training back-end: one rank of a trainer, in any role, with Megatron's layers.

    batch -> passes, one per micro-batch: network -> log-probs or values -> loss -> backward (gradients add up)
          -> Megatron's sums over the ranks -> global norm, clipping, AdamW on this data rank's part -> network

Packing, attention, vocabulary projection, losses and checkpoints are shared with the back-end `torch`, and so are its
invariants.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from roll.errors import UnsupportedError
from roll.protocols import StateKind, WeightSource
from roll.training.checkpoint.full_state import load_full_state, save_full_state
from roll.training.distributed import pick_device
from roll.training.language_rank import LanguageModelRank
from roll.training.megatron.convert import Network, collect_weights, convert_from_hf
from roll.training.megatron.full_weights import MegatronWeights
from roll.training.megatron.initialize import (
    all_reduce_gradients,
    check_spec,
    create_process_groups,
    reduce_tied_gradients,
    wrap_data_parallel,
)
from roll.training.megatron.optimizer import MegatronOptimizer
from roll.training.network.loading import build_network
from roll.training.network.lora import apply_loraplus
from roll.training.network.weights import TrainerWeights, collect_adapters
from roll.training.offload import are_on_host
from roll.training.passes import PassRunner
from roll.training.spec import TrainerSpec
from roll.types import OptimParams

__all__ = ["MegatronBackend"]


class MegatronBackend(LanguageModelRank):
    """The Megatron back-end of a trainer rank. See `LanguageModelRank`.

    Args:
        spec: The spec of the rank; `spec.training.parallel` sets the parallel sizes.

    Raises:
        ModelError: Megatron is not installed, the device is not supported, or the model cannot be loaded, converted or
            sharded.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        check_spec(spec, pick_device(spec))
        super().__init__(spec)
        create_process_groups(spec, self.device)
        self._hf = build_network(spec, self.engine_dtype)
        self._model_names = [name for name, _ in self._hf.root.named_parameters()]
        lora = None if spec.role == "reference" else spec.model.lora
        self.network, config, placement = convert_from_hf(self._hf, spec.training, self.ranks, lora)
        parameters = collect_weights(self.network)
        self._ddp: Any = None
        self._optimizer: Any = None
        if spec.role == "reference":
            self.network.requires_grad_(False)
        else:
            heads = {name: self.head_factor for name in placement.trained if name.startswith("value_head.")}
            factors = apply_loraplus(lora, placement.trained, heads)
            by_parameter = {placement.locations[name].parameter: factor for name, factor in factors.items()}
            trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            self._ddp = wrap_data_parallel(self.network, config)
            self._optimizer = MegatronOptimizer(self._ddp, trained, by_parameter, spec.training)
        self.full_weights = MegatronWeights(parameters, placement, self._optimizer)
        self._passes = PassRunner(spec, self.network, self.ranks, self.device, self._random_states, call=self._ddp)

    def weights(self) -> WeightSource:
        return TrainerWeights(
            names=self._model_names,
            read=self.full_weights.read,
            adapters=collect_adapters(self._hf),
            dtype=self.engine_dtype,
            is_first=self.ranks.is_first,
            model=self._hf.root if self._hf.projection is not None else self._hf.backbone,
            get_shape=self.full_weights.get_shape,
        )

    def save(self, path: Path, *, background: bool = False) -> None:
        """Save the state in the foreground even if `background` is true, because it must be gathered from all ranks."""
        self._check_trained("has no state to save")
        save_full_state(path, self.full_weights, self._get_counters(), self.ranks, self._random_states)

    def offload(self, states: Collection[StateKind]) -> None:
        """Reject offloading on a GPU; on a CPU all states are in host memory already."""
        if not are_on_host(states, self.device):
            raise UnsupportedError(
                "training.backend 'megatron' does not support offloading of states: use separate devices for trainers "
                "and engines"
            )

    def onload(self, states: Collection[StateKind]) -> None:
        """Do nothing, because `offload` never moves a state."""

    def close(self) -> None:
        if self.ranks.size > 1:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        super().close()

    @property
    def _hf_network(self) -> Network:
        return self._hf

    def _read(self, name: str) -> Tensor:
        return self.full_weights.read(name)

    def _load(self, path: Path) -> dict[str, int]:
        self._check_trained("has no state to load")
        return load_full_state(
            path, self.full_weights, self._get_counters(), self.ranks, self._random_states, self.spec.seed
        )

    def _clear_grads(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _compute_grad_norm(self) -> float:
        if self.network.pipeline_split is not None:
            reduce_tied_gradients(self.network.pipeline_split, collect_weights(self.network))
        all_reduce_gradients(self._ddp)
        return self._optimizer.prepare_grads()

    def _scale_grads(self, scale: float) -> None:
        self._ddp.scale_gradients(scale)

    def _step_optimizer(self, learning_rate: float, grad_norm: float, params: OptimParams) -> None:
        self._optimizer.step(learning_rate, grad_norm)
