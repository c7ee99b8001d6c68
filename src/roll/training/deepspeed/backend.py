"""The `deepspeed` training back-end: one rank of a trainer, in any role, with weights and states partitioned by ZeRO.

    batch -> passes, one per micro-batch: network -> log-probs or values -> loss -> DeepSpeed's backward, which reduces
          -> DeepSpeed's step: global norm, clipping, AdamW on this rank's part -> network

Invariants: The loss is normalized by global counts, so the back-end undoes DeepSpeed's averaging over ranks, and
DeepSpeed does not divide by the number of micro-batches. A step with a non-finite loss or gradients changes nothing.
Checkpoints have the same format as those of the back-end `torch`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roll.errors import UnsupportedError
from roll.protocols import StateKind, WeightSource
from roll.training.checkpoint.full_state import load_full_state, save_full_state
from roll.training.deepspeed.initialize import (
    check_spec,
    get_local_rank,
    initialize_frozen,
    initialize_trained,
    set_launcher_environment,
)
from roll.training.deepspeed.state_offload import ZeroStateOffloader
from roll.training.deepspeed.zero_weights import ZeroWeights, gather_parameter
from roll.training.distributed import pick_device
from roll.training.language_rank import LanguageModelRank
from roll.training.memory.activation_checkpointing import tile_mlps
from roll.training.network.distributions import Predictions
from roll.training.network.loading import build_network
from roll.training.network.lora import apply_loraplus
from roll.training.network.policy import PolicyNetwork
from roll.training.network.vision_parts import compute_learning_rate_factors
from roll.training.network.weights import TrainerWeights
from roll.training.offload import are_on_host
from roll.training.passes import PassRunner
from roll.training.rank import invalidate_on_failure
from roll.training.spec import TrainerSpec
from roll.types import OptimParams

__all__ = ["DeepSpeedBackend"]


class DeepSpeedBackend(LanguageModelRank):
    """The DeepSpeed back-end of a trainer rank. See `LanguageModelRank`.

    Args:
        spec: The spec of the rank; `spec.training.deepspeed` sets the partitioning.

    Raises:
        ModelError: DeepSpeed is not installed, or the model cannot be loaded, packed, or trained in its dtype.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        check_spec(spec, pick_device(spec))
        super().__init__(spec)
        self.stage = spec.training.deepspeed.zero_stage
        self.network = build_network(spec, self.engine_dtype).to(self.device)
        if spec.training.tiled_mlp_tokens is not None:
            tile_mlps(self.network, spec.training.tiled_mlp_tokens)
        self.model = self.network.root
        self._engine: Any = None
        self.full_weights: ZeroWeights | None = None
        """The weights of a trained role; `None` for a reference."""
        if spec.role != "reference":
            heads = self.network.heads if isinstance(self.network, PolicyNetwork) else {}
            trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad} | heads
            factors = dict.fromkeys(heads, self.head_factor)
            factors |= compute_learning_rate_factors(self.model, spec.model.vision, trainable.keys() - heads.keys())
            factors = apply_loraplus(spec.model.lora, trainable, factors)
            self._engine = initialize_trained(spec, self.network, trainable, factors, device=self.device)
            self.full_weights = ZeroWeights(self._engine, trainable, self.stage, self.ranks.rank)
        elif self.stage == 3 and self.ranks.size > 1:
            self._engine = initialize_frozen(spec, self.network, device=self.device)
        # The engine must be called instead of the network: its hooks gather partitioned weights.
        call = None if self._engine is None else self._predict
        self._passes = PassRunner(spec, self.network, self.ranks, self.device, self._random_states, call=call)
        self._inside_step = False
        """True if gradients have been added since the last update; after a failed micro-batch, they remain."""

    def weights(self) -> WeightSource:
        adapted, is_first = self.spec.model.lora is not None, self.ranks.is_first
        dtype = self.engine_dtype
        return TrainerWeights.from_network(
            self.network, adapted=adapted, dtype=dtype, is_first=is_first, read=self._gather_whole
        )

    def save(self, path: Path, *, background: bool = False) -> None:
        """Save the state in the foreground even if `background` is true, because it must be gathered from all ranks."""
        with self._get_library_context():
            save_full_state(path, self._get_trained_weights(), self._get_counters(), self.ranks, self._random_states)

    def offload(self, states: Collection[StateKind]) -> None:
        """Offload states to host memory; not supported at stage 0, or where DeepSpeed offloads the weights itself."""
        if are_on_host(states, self.device):
            return
        if self.stage == 0 or self.full_weights is None or self.spec.training.deepspeed.offload_parameters:
            raise UnsupportedError(
                "DeepSpeed supports offloading of states only for trained roles, with zero_stage 1 or higher and "
                "without offload_parameters: use separate devices for trainers and engines"
            )
        self._get_state_offloader(self.full_weights).offload(states)
        torch.get_device_module(self.device).empty_cache()

    def onload(self, states: Collection[StateKind]) -> None:
        if self.device.type != "cpu":
            self._get_state_offloader(self._get_trained_weights()).onload(states, self.device)

    def _get_state_offloader(self, weights: ZeroWeights) -> ZeroStateOffloader:
        moves_states = self.stage == 3 and not self.spec.training.deepspeed.offload_optimizer
        return ZeroStateOffloader(self._engine, weights, moves_states=moves_states)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
        super().close()

    def _get_library_context(self) -> contextlib.AbstractContextManager[None]:
        return set_launcher_environment(get_local_rank(self.spec, self.device))

    def _get_trained_weights(self) -> ZeroWeights:
        self._check_trained("has no state to save or load")
        assert self.full_weights is not None
        return self.full_weights

    def _predict(self, *arguments: Any) -> Predictions:
        return Predictions(*self._engine(*arguments))

    def _read(self, name: str) -> Tensor:
        return self._gather_whole(self.model.get_parameter(name))

    def _gather_whole(self, tensor: Tensor) -> Tensor:
        with self._get_library_context():
            return gather_parameter(tensor) if isinstance(tensor, nn.Parameter) else tensor

    def _load(self, path: Path) -> dict[str, int]:
        parts = self._get_trained_weights(), self._get_counters(), self.ranks, self._random_states
        return load_full_state(path, *parts, self.spec.seed)

    def _clear_grads(self) -> None:
        """Check that a failed step has left no gradients, since DeepSpeed cannot discard gradients."""
        if self._inside_step:
            raise UnsupportedError(
                "a step failed between micro-batches, and DeepSpeed cannot discard the accumulated gradients: "
                "resume from a checkpoint in a new process"
            )

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Run DeepSpeed's backward pass on the loss times the number of data ranks, because DeepSpeed averages over
        ranks.

        DeepSpeed checks only gradients, so a non-finite loss is turned into non-finite gradients.
        """
        self._inside_step = True
        # DeepSpeed reduces gradients only at the last micro-batch before an update, so each update takes one batch.
        self._engine.set_gradient_accumulation_boundary(last)
        summed = loss * self.ranks.data_size
        self._engine.backward(summed if torch.isfinite(loss) else summed * math.nan, scale_wrt_gas=False)

    def _check_accumulation(self, last: bool) -> None:
        if not last:
            raise UnsupportedError(
                "DeepSpeed supports only one batch per update: call forward_backward once, with last=True"
            )

    def _check_params(self, params: OptimParams, scale: float) -> None:
        super()._check_params(params, scale)
        if scale != 1.0:
            raise UnsupportedError(
                "optim_step cannot scale gradients that DeepSpeed has already reduced: pass counts to forward_backward"
            )

    def _scale_grads(self, scale: float) -> None:
        """Raise an error; never called, since `_check_params` rejects every scale other than 1."""
        raise AssertionError(f"gradients are scaled by {scale:g}")

    def _update(self, loss: float, learning_rate: float, params: OptimParams) -> tuple[float, bool]:
        """Run an optimizer step; return the gradient norm and whether the step was applied.

        From stage 1 on, DeepSpeed itself skips a step with non-finite gradients. At stage 0, DeepSpeed does not check
        gradients, so the base class checks them.
        """
        engine = self._engine
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]
        if self.stage == 0:
            grad_norm, stepped = super()._update(loss, learning_rate, params)
            if not stepped:
                engine.zero_grad()
        else:
            with invalidate_on_failure():
                engine.step()
                grad_norm, stepped = float(engine.get_global_grad_norm()), bool(engine.was_step_applied())
        self._inside_step = False
        return grad_norm, stepped

    def _compute_grad_norm(self) -> float:
        grads = [p.grad for p in self._get_trained_weights().parameters.values() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)).double()
        return float(norms.square().sum().sqrt())

    def _step_optimizer(self, learning_rate: float, grad_norm: float, params: OptimParams) -> None:
        self._engine.step()
