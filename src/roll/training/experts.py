"""MoE layers: each expert processes all tokens that its router assigned to it, in one matmul.

    pairs of a token and an expert ─ sorted by expert ─► up, gate, down ─ times the router's weight ─► back in order

`transformers` stacks a layer's experts in 3-D tensors (biases: 2-D), whose first dimension is the expert. On a CPU and
in float64, one matmul per expert is written into the result. The results are bitwise equal to those of `grouped_mm`, at
the same speed. Accelerators use the `grouped_mm` kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["compute_expert_outputs", "find_experts", "use_grouped_gemm"]


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return, by name, a model's expert modules whose weight layout `compute_expert_outputs` supports."""
    return {name: module for name, module in model.named_modules() if _is_supported(module)}


def use_grouped_gemm(model: nn.Module) -> None:
    """Make a model compute all experts of a layer at once, with `compute_expert_outputs`."""
    for module in find_experts(model).values():
        module.forward = _build_grouped_forward(module)


def compute_expert_outputs(
    experts: Any, parameters: Mapping[str, Tensor], states: Tensor, rows: Tensor, expert_ids: Tensor, weights: Tensor
) -> Tensor:
    """Compute the outputs [P, H] of P token-expert pairs, multiplied by the router's weights.

    The dtype of the result is the wider of two dtypes: that of the experts' outputs and that of `weights`.

    Args:
        experts: A module that `find_experts` returned.
        parameters: The parameters by name, for all experts, or for the local experts that `expert_ids` indexes.
        states: The hidden states [n, H] of tokens.
        rows: The token of each pair [P].
        expert_ids: The expert of each pair [P].
        weights: The router weight of each pair [P].
    """
    by_expert = expert_ids.argsort(stable=True)
    sorted_experts = expert_ids[by_expert]
    counts = torch.bincount(expert_ids, minlength=len(parameters["down_proj"]))

    def project(x: Tensor, name: str) -> Tensor:
        projected = _grouped_matmul(x, parameters[name], counts, transposed=experts.is_transposed)
        return projected + parameters[f"{name}_bias"][sorted_experts] if experts.has_bias else projected

    x = states[rows[by_expert]]
    x = experts._apply_gate(project(x, "gate_up_proj")) if experts.has_gate else experts.act_fn(project(x, "up_proj"))
    outputs = project(x, "down_proj") * weights[by_expert, None]
    # The argsort of a permutation is its inverse.
    return outputs[by_expert.argsort()]


def _is_supported(module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    names = ("has_gate", "has_bias", "is_transposed")
    if not isinstance(count, int) or not all(isinstance(getattr(module, name, None), bool) for name in names):
        return False
    first = "gate_up_proj" if module.has_gate else "up_proj"
    wanted = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if module.has_bias else set())
    return set(module._parameters) == wanted and all(len(p) == count for p in module._parameters.values())


def _build_grouped_forward(experts: Any) -> Any:
    def forward(states: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        parameters = {name: getattr(experts, name) for name in experts._parameters}
        (length, num_chosen), width = expert_ids.shape, states.shape[-1]
        rows = torch.arange(length, device=states.device).repeat_interleave(num_chosen)
        found = compute_expert_outputs(experts, parameters, states, rows, expert_ids.reshape(-1), weights.reshape(-1))
        return found.view(length, num_chosen, width).sum(1).to(states.dtype)

    return forward


def _grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, *, transposed: bool) -> Tensor:
    """Multiply rows [P, in] by expert matrices; return [P, out]. The first `counts[0]` rows use the first matrix, and
    so on.

    Args:
        x: The rows.
        weight: The matrices, [E, in, out] if `transposed`, otherwise [E, out, in].
        counts: The number of rows of each expert [E].
        transposed: See `weight`.
    """
    x = x.to(weight.dtype)
    if _has_kernel(weight):
        matrices = weight if transposed else weight.transpose(1, 2)
        return functional.grouped_mm(x, matrices, offs=counts.cumsum(0).to(torch.int32))
    result = _MatmulPerExpert.apply(x, weight, counts.tolist(), transposed)
    assert isinstance(result, Tensor)
    return result


def _has_kernel(weight: Tensor) -> bool:
    """Return whether `grouped_mm` supports the matrices. They must be on an accelerator (for NVIDIA, Ampere or newer),
    and the size of a row must be a multiple of 16 bytes.
    """
    if weight.device.type == "cpu" or weight.dtype == torch.float64:
        return False
    is_nvidia = weight.device.type == "cuda" and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    return all(width * weight.element_size() % 16 == 0 for width in weight.shape[1:])


class _MatmulPerExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.transposed = counts, transposed
        result = x.new_empty(len(x), weight.shape[2 if transposed else 1])
        for own, matrix, out in zip(x.split(counts), weight, result.split(counts), strict=True):
            if len(own):
                torch.mm(own, matrix if transposed else matrix.t(), out=out)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (grad,), counts, transposed = grads, ctx.counts, ctx.transposed
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if of_x is not None:
            for own, matrix, out in zip(grad.split(counts), weight, of_x.split(counts), strict=True):
                if len(own):
                    torch.mm(own, matrix.t() if transposed else matrix, out=out)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        if of_weight is not None:
            for own, given, out in zip(grad.split(counts), x.split(counts), of_weight, strict=True):
                if not len(own):
                    # The memory is not initialized, and an expert without tokens has a gradient of 0.
                    out.zero_()
                elif transposed:
                    torch.mm(given.t(), own, out=out)
                else:
                    torch.mm(own.t(), given, out=out)
        return of_x, of_weight, None, None
