"""Megatron's distributed optimizer: AdamW with states sharded over the ranks that have the same weights.

experts           over the ranks with the same experts
other weights     over the data and context ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.config.training import TrainingConfig
from roll.training.megatron.initialize import is_expert, suppress_import_warnings

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer:
    """The distributed optimizers of one rank: one for its experts, and one for its other weights.

    Args:
        ddp: The result of `wrap_data_parallel`.
        trained: The trained weights by name; weight decay applies to matrices only.
        factors: Learning rate factors of some weights, by name.
        training: The training configuration, with AdamW's hyperparameters.
    """

    def __init__(
        self, ddp: Any, trained: Mapping[str, nn.Parameter], factors: Mapping[str, float], training: TrainingConfig
    ) -> None:
        self._ddp = ddp
        self._max_grad_norm = training.max_grad_norm
        self._by_kind = {
            kind: _build_optimizer(ddp, own, factors, training, are_experts=kind)
            for kind in (False, True)
            if (own := {name: p for name, p in trained.items() if is_expert(p) is kind})
        }

    @property
    def parts(self) -> Iterator[tuple[Any, Tensor]]:
        """The tensors that this rank updates, with their AdamW optimizers."""
        for each in self._by_kind.values():
            for part in each.get_parameters():
                yield each.optimizer, part

    def get_group(self, parameter: nn.Parameter) -> ProcessGroup:
        """Return the ranks over which the states of a parameter are sharded."""
        return self._by_kind[is_expert(parameter)].data_parallel_group

    def get_part(self, parameter: nn.Parameter) -> tuple[Any, Tensor, slice] | None:
        """Return the AdamW optimizer and the tensor that update a parameter on this rank, and the entries of the flat
        parameter that the tensor covers; `None` if only other ranks update the parameter.
        """
        optimizer = self._by_kind[is_expert(parameter)]
        if parameter not in optimizer.model_param_gbuf_map:
            return None
        entries = optimizer._get_model_param_range_map(parameter)["param"]
        group, order = optimizer.model_param_group_index_map[parameter]
        part = optimizer.optimizer.param_groups[group]["params"][order]
        return optimizer.optimizer, part, slice(entries.start, entries.end)

    def zero_grad(self) -> None:
        """Discard the gradients of the tensors that this rank updates."""
        for each in self._by_kind.values():
            each.zero_grad()

    def prepare_grads(self) -> float:
        """Copy the reduced gradients to the updated tensors; return the norm over all weights. Collective."""
        from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

        grads: list[Tensor] = []
        for each in self._by_kind.values():
            each.prepare_grads()
            grads += each.get_main_grads_for_grad_norm()
        # Summed over all ranks: each has a part of the gradients.
        return float(get_grad_norm_fp32(grads, grad_stats_parallel_group=None))

    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Clip the gradients and update the weights on all ranks. Collective."""
        # `step_with_ready_grads` does not clip.
        if grad_norm > self._max_grad_norm:
            grads = [part.grad for _, part in self.parts if part.grad is not None]
            torch._foreach_mul_(grads, self._max_grad_norm / grad_norm)
        for each in self._by_kind.values():
            for group in each.param_groups:
                group["lr"] = learning_rate * group["factor"]
            each.step_with_ready_grads()

    def refresh(self) -> None:
        """Copy the master weights into the network on every rank. Collective."""
        for each in self._by_kind.values():
            each._copy_main_params_to_model_params()
        # Each rank has written only its own range, so gather the other ranges.
        self._ddp.start_param_sync()


def _build_optimizer(
    ddp: Any,
    trained: Mapping[str, nn.Parameter],
    factors: Mapping[str, float],
    training: TrainingConfig,
    *,
    are_experts: bool,
) -> Any:
    """Build Megatron's distributed optimizer: each rank updates a part of the weights with PyTorch's AdamW."""
    with suppress_import_warnings():
        from megatron.core import parallel_state
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer_config import OptimizerConfig

    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        decay = training.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, factors.get(name, 1.0)), []).append(parameter)
    adamw = torch.optim.AdamW(
        [
            {"params": own, "weight_decay": decay, "factor": factor, "is_expert_parallel": are_experts}
            for (decay, factor), own in groups.items()
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )
    if are_experts:
        buffers, ranks = ddp.expert_parallel_buffers, parallel_state.get_expert_data_parallel_group()
        others = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        tp = parallel_state.get_expert_tensor_parallel_group()
    else:
        buffers, ranks = ddp.buffers, parallel_state.get_data_parallel_group(with_context_parallel=True)
        others, tp = parallel_state.get_model_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    dtype = next(iter(trained.values())).dtype
    optimizer = DistributedOptimizer(
        adamw,
        OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            # Non-finite gradients must be found before anything changes, so the back-end computes the norm and clips.
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[ddp],
        per_model_buffers={0: buffers},
        data_parallel_group=ranks,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=dist.get_rank(others),
        distributed_optimizer_instance_id=0,
    )
    optimizer.tp_group = tp
    return optimizer
