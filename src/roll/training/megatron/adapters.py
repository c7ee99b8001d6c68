"""LoRA adapters of Megatron's linear layers, with the same matrices as in the HF model.

    linear_qkv, linear_fc1     own tokens ─ A ─► [n, r] ─ all-gather ─► [N, r] ─ own rows of B ─► own outputs
    linear_proj, linear_fc2    own inputs ─ own columns of A ─► [N, r] ─ reduce-scatter ─► [n, r] ─ B ─► own tokens

A fused layer has an adapter for each of its parts (q, k and v; gate and up). The tp ranks exchange r numbers per token
and adapter. Gradients of replicated matrices are summed over the tp ranks, because each rank computes the gradient of
its own tokens. Shared experts and their adapters are not sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.training.megatron.weight_mapping import WeightLocation, get_adapter_module
from roll.training.network.lora import Adapter, SwitchableAdapters
from roll.training.parallel.collectives import all_gather, reduce_scatter

__all__ = ["attach_adapters"]

_PARTS: Mapping[str | None, Sequence[str]] = {
    **dict.fromkeys("qkv", "qkv"),
    **dict.fromkeys(("gate", "up"), ("gate", "up")),
    None: ("whole",),
}
"""The parts of a fused parameter in order, indexed by each of its parts."""


class _Adapter(nn.Module):
    """This rank's part of one adapter: A [rank, inputs] and B [outputs, rank]."""

    def __init__(self, shape_a: Sequence[int], shape_b: Sequence[int], dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(*shape_a, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(*shape_b, dtype=dtype))
        self.scale = scale


class _LinearAdapters(SwitchableAdapters):
    """The adapters of one linear layer, by part.

    Args:
        location: The location of the weight of one of the adapted layers.
        num_outputs: The number of this rank's outputs of the linear layer.
        dropout: The probability with which an input is dropped during training.
        tp: The tp ranks, whose activations are sequence-parallel between linear layers.
    """

    def __init__(self, location: WeightLocation, num_outputs: int, dropout: float, tp: ProcessGroup | None) -> None:
        super().__init__()
        self._parts = _PARTS[location.part]
        self._heads = location.heads if location.part in ("q", "k", "v") else None
        self._is_row_parallel = location.dim == 1
        self._num_outputs = num_outputs
        self._dropout = dropout
        self._tp = None if location.dim is None else tp

    def forward(self, states: Tensor) -> Tensor:
        """Return the adapters' outputs, in the shape of the layer's output, from the layer's input [n, 1, inputs]."""
        adapters: dict[str, Any] = dict(self.named_children())
        low = [F.linear(F.dropout(states, self._dropout, self.training), own.lora_A) for own in adapters.values()]
        ranks = [each.shape[-1] for each in low]
        together = torch.cat(low, dim=-1)  # one collective for all parts
        if self._tp is not None:
            together = (reduce_scatter if self._is_row_parallel else all_gather)(together, self._tp)
        outputs = {
            part: own.scale * F.linear(each, own.lora_B)
            for (part, own), each in zip(adapters.items(), together.split(ranks, dim=-1), strict=True)
        }
        return self._fuse(outputs)

    def _fuse(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs [N, 1, size] of all parts in the layout of the fused parameter's rows."""
        if len(self._parts) == 1:
            return outputs[self._parts[0]]
        one = next(iter(outputs.values()))
        if self._heads is None:
            size = self._num_outputs // len(self._parts)
            return torch.cat([_or_zeros(outputs.get(part), one, (size,)) for part in self._parts], dim=-1)
        queries, width = self._heads.queries, self._heads.width
        count = self._num_outputs // ((queries + 2) * width)
        shapes = {part: (count, queries if part == "q" else 1, width) for part in self._parts}
        return torch.cat([_or_zeros(outputs.get(part), one, shape) for part, shape in shapes.items()], dim=-2).flatten(
            -3
        )


def _or_zeros(output: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an output with its last dimension unflattened to `shape`, or zeros if the part has no adapter."""
    return like.new_zeros(*like.shape[:-1], *shape) if output is None else output.unflatten(-1, shape)


def attach_adapters(
    model: nn.Module,
    adapters: Mapping[str, Adapter],
    weights: Mapping[str, Tensor],
    locations: Mapping[str, WeightLocation],
    dropout: float,
    tp: ProcessGroup | None,
) -> None:
    """Add the adapters of an HF model to the linear layers of a Megatron model, in place and uninitialized.

    Args:
        model: The module below which the locations are.
        adapters: The adapters of the HF model, by the checkpoint name of the adapted weight.
        weights: The HF model's parameters by name.
        locations: The locations of the HF model's parameters, by name.
        dropout: The probability with which an input is dropped during training.
        tp: The ranks over which the weights are sharded.
    """
    for adapter in adapters.values():
        layer = adapter.a.partition(".lora_A.")[0]
        location = locations[f"{layer}.base_layer.weight"]
        linear: Any = model.get_submodule(location.parameter.removesuffix(".weight"))
        if not hasattr(linear, "adapters"):
            linear.adapters = _LinearAdapters(location, linear.weight.shape[0], dropout, tp)
            linear.forward = _build_adapted_forward(linear, linear.forward)
        a, b = (_shard_shape(weights[name].shape, locations[name].dim, tp) for name in (adapter.a, adapter.b))
        part = get_adapter_module(location).rpartition(".")[2]
        linear.adapters.add_module(part, _Adapter(a, b, weights[adapter.a].dtype, adapter.scale))


def _shard_shape(shape: Sequence[int], dim: int | None, tp: ProcessGroup | None) -> list[int]:
    return [size // tp.size() if tp is not None and i == dim else size for i, size in enumerate(shape)]


def _build_adapted_forward(linear: Any, original_forward: Any) -> Any:
    def forward(states: Tensor) -> Any:
        result = original_forward(states)
        if not linear.adapters.is_enabled:
            return result
        added = linear.adapters(states)
        # Megatron's linear layers return (output, bias); other layers return only their output.
        return (result[0] + added, result[1]) if isinstance(result, tuple) else result + added

    return forward
