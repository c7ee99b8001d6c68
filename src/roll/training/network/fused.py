"""Fused kernels for a CPU in bfloat16: RMSNorm and SwiGLU, each in one pass over memory, and attention with RoPE.

PyTorch computes a norm or a gate on a CPU as five to fifteen operations, each of which reads and writes the whole
tensor; together with the softmax over the vocabulary, these operations took a third of the time of a training step.

    HF module ─ equivalent to a known module ─► its `forward` replaced by the fused function
              ─ anything else ─► left as it is

A module is recognized by its outputs: the replacement must give the same outputs as the module on random inputs.
Therefore a norm that adds 1 to its weight, or a gate with another activation, is never mistaken for a plain norm or
gate. Adapters keep working, because only code between the projections is replaced. Calls in another dtype or on another
device are computed by the module itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roll.training.attention.fused import build_fused_attention
from roll.training.kernels.native import NativeLibrary, load_native_library

__all__ = ["use_fused_kernels"]

TOLERANCE = 2.0**-7
"""Relative tolerance: one unit in the last place of a bfloat16."""


def use_fused_kernels(model: nn.Module) -> int:
    """Replace the `forward` of supported modules in a bfloat16 CPU model; return the number of replaced modules.

    Call it before adding adapters.
    """
    library = load_native_library()
    if library is None:
        return 0
    count = 0
    for module in model.modules():
        replacement = _build_fused_norm(module, library) or _build_fused_gate(module, library)
        if replacement is None or not _has_same_result(module, replacement):
            replacement = build_fused_attention(module)
        if replacement is not None:
            module.forward = replacement
            count += 1
    return count


def _build_fused_norm(module: Any, library: NativeLibrary) -> Callable[[Tensor], Tensor] | None:
    epsilon = getattr(module, "variance_epsilon", None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or epsilon is None or weight is None or weight.ndim != 1:
        return None
    original_forward = module.forward

    def forward(x: Tensor) -> Tensor:
        if not _are_fused_kernels_supported(x, module.weight) or x.shape[-1] != len(module.weight):
            return original_forward(x)
        return _RMSNorm.apply(x, module.weight, float(epsilon), library)

    return forward


def _build_fused_gate(module: Any, library: NativeLibrary) -> Callable[[Tensor], Tensor] | None:
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj")):
        return None
    if not callable(getattr(module, "act_fn", None)):
        return None

    def forward(x: Tensor) -> Tensor:
        gate, up = module.gate_proj(x), module.up_proj(x)
        gated = _SwiGLU.apply(gate, up, library) if _are_fused_kernels_supported(gate, up) else module.act_fn(gate) * up
        return module.down_proj(gated)

    return forward


def _are_fused_kernels_supported(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in tensors)


@torch.no_grad()
def _has_same_result(module: Any, replacement: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a module and its replacement compute the same result for random inputs of two magnitudes."""
    weight = module.gate_proj.weight if hasattr(module, "gate_proj") else module.weight
    if not _are_fused_kernels_supported(weight):
        return False
    generator = torch.Generator().manual_seed(0)
    for size in (0.1, 3.0):
        x = (size * torch.randn(3, weight.shape[-1], generator=generator)).to(torch.bfloat16)
        expected, found = module.forward(x).float(), replacement(x).float()
        largest = float(expected.abs().max())
        if not math.isfinite(largest) or not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * largest):
            return False
    return True


class _RMSNorm(torch.autograd.Function):
    """Computes bf16(x / sqrt(mean(x^2) + epsilon)) w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, library: NativeLibrary) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        width = x.shape[-1]
        result = torch.empty_like(x)
        inverse = torch.empty(x.numel() // width, dtype=torch.float32)
        library.call("rms_norm", x, weight, epsilon, result, inverse, len(inverse), width)
        ctx.save_for_backward(x, weight, inverse)
        ctx.library = library
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        grad_x = torch.empty_like(x)
        # A row for each thread, summed in order: the same number of threads gives the same bits.
        shares = torch.zeros(torch.get_num_threads(), width)
        rows = len(inverse)
        ctx.library.call("rms_norm_backward", grads[0].contiguous(), x, weight, inverse, grad_x, shares, rows, width)
        return grad_x, shares.sum(0).to(weight.dtype), None, None


class _SwiGLU(torch.autograd.Function):
    """Computes bf16(silu(gate)) up; saves only its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, library: NativeLibrary) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        result = torch.empty_like(gate)
        library.call("swiglu", gate, up, result, gate.numel())
        ctx.save_for_backward(gate, up)
        ctx.library = library
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        ctx.library.call("swiglu_backward", grads[0].contiguous(), gate, up, grad_gate, grad_up, gate.numel())
        return grad_gate, grad_up, None
