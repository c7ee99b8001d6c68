"""FP8 training: linear layers of a decoder computed in 8-bit floating point, on devices that support it.

                     rowwise_with_gw_hp               rowwise
    output           x by token   ·  w by output      x by token   ·  w by output
    input's grad     g by token   ·  w                g by token   ·  w by input
    weight's grad    bfloat16                         g by output  ·  x by input

All operands are in e4m3, with a scale for each token, output or input, or one scale for the whole matrix. The recipes
and their names are torchao's. Each token has its own scales, so its log-prob does not depend on the other sequences in
its row. With one scale for all tokens (`tensorwise`), packing a sequence with others changed log-probs of SmolLM2-135M
by up to 2.5, which makes importance ratios meaningless.

Scales are computed from the current values, and are powers of two: scaling by them is exact, unless a value is about
2^14 times smaller than the largest value with the same scale. Therefore results hardly depend on how a matrix is
sharded. Kernels without row-wise scales suffice, because multiplying their rounded results by the scales is exact.

Products are accumulated in float32, and results are bfloat16. Autograd saves the same tensors as without FP8: several
projections share an input, and the 8-bit copies would take more memory than one 16-bit tensor.

torchao itself replaces modules and adds a tensor subclass, which conflicts with weights that are not loaded yet,
DTensor shards, fused kernels and peft. Here, only `forward` is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from roll.config.training import Fp8Recipe
from roll.errors import ModelError
from roll.models import find_routers, get_decoder

__all__ = ["check_fp8_support", "use_fp8"]

logger = logging.getLogger(__name__)

SIZE_MULTIPLE = 16
"""Both sizes of a matrix must be multiples of this number; products over tokens are padded to a multiple of it."""

_MIN_MAGNITUDE = 1e-12
"""Lower bound of the magnitude from which a scale is computed, to avoid a division by 0."""
_EXPONENT_MASK = 0x7F800000
"""Bit mask that rounds a positive float32 down to a power of two."""
_ROUTER_NAMES = ("gate", "router")
"""Names of router layers, which are not quantized."""
_E4M3_FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""The e4m3 formats to try, in this order; the second is the format of AMD's MI300."""


class _Fp8Support(NamedTuple):
    """The FP8 format and the FP8 kernels supported by a type of device."""

    e4m3: torch.dtype
    by_row: bool
    """True if the device has a kernel for row-wise scales."""


class _QuantizedTensor(NamedTuple):
    """A tensor quantized to 8 bits, and the factors that dequantize it."""

    values: Tensor
    """The quantized values [rows, columns], contiguous; columns are padded with zeros to a multiple of 16."""
    factor: Tensor
    """The factors, float32, [rows, 1] or [1]."""


def use_fp8(model: Any, recipe: Fp8Recipe, tp: int = 1) -> int:
    """Make the linear layers of a bfloat16 model's decoder use an FP8 recipe, in place. Call it before adding adapters.

    Modules keep their identity, names and weights: only their `forward` changes. Layers whose sizes divided by `tp` are
    not multiples of 16 stay unchanged, and so do experts, which are not linear layers.

    Args:
        model: An HF model.
        recipe: The recipe of the matmuls.
        tp: The number of ranks over which a matrix is sharded.

    Returns:
        The number of layers that use FP8.

    Raises:
        ModelError: No layer can use FP8.
    """
    layers: list[Any] = list(_iter_linear_layers(model))
    fitting = [layer for layer in layers if all(size % (SIZE_MULTIPLE * tp) == 0 for size in layer.weight.shape)]
    several = f" x training.parallel.tp {tp}" if tp > 1 else ""
    if not fitting:
        raise ModelError(
            f"training.fp8 is '{recipe}', but none of the {len(layers)} linear layers in {type(model).__name__}'s "
            f"decoder has sizes that are multiples of {SIZE_MULTIPLE}{several}: set training.fp8 to none"
        )
    if len(fitting) < len(layers):
        logger.warning(
            "training.fp8: %d of %d linear layers of the decoder use FP8; the others stay in bfloat16, because their "
            "sizes are not multiples of %d%s",
            *(len(fitting), len(layers), SIZE_MULTIPLE, several),
        )
    for layer in fitting:
        layer.forward = _build_fp8_forward(layer, recipe)
    return len(fitting)


def check_fp8_support(device: torch.device) -> None:
    """Check that a device supports FP8 matmuls, by running one; on a CPU, warn that they are slow.

    Raises:
        ModelError: The device does not support FP8 matmuls.
    """
    _detect_support(device.type)
    if device.type == "cpu":
        _warn_slow_on_cpu()


@cache
def _warn_slow_on_cpu() -> None:
    """Warn once that FP8 on a CPU is slow."""
    logger.warning(
        "training.fp8 on a CPU is only useful for tests: FP8 matmuls are slower on CPUs than bfloat16 matmuls"
    )


def _iter_linear_layers(model: Any) -> Iterator[nn.Linear]:
    """Yield the linear layers in the decoder layers of a language model or a bare decoder, except MoE routers."""
    decoder = get_decoder(model) if hasattr(model, "get_decoder") else model.base_model
    routers = set(find_routers(model)) if hasattr(model, "get_decoder") else set()
    for layer in getattr(decoder, "layers", ()):
        for name, module in layer.named_modules():
            chooses = module in routers or name.rpartition(".")[2] in _ROUTER_NAMES
            if type(module) is nn.Linear and not chooses:
                yield module


def _build_fp8_forward(layer: nn.Linear, recipe: Fp8Recipe) -> Callable[[Tensor], Tensor]:
    original_forward = layer.forward

    def forward(x: Tensor) -> Tensor:
        weight = layer.weight  # looked up at each call, because sharding replaces it
        if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not x.numel():
            return original_forward(x)
        result = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, recipe).view(*x.shape[:-1], -1)
        return result if layer.bias is None else result + layer.bias

    return forward


class _Linear(torch.autograd.Function):
    """A linear function with FP8 matmuls: outputs [n, outputs] from x [n, inputs] and a weight [outputs, inputs]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Fp8Recipe) -> Tensor:
        device = _detect_support(x.device.type)
        # In bfloat16: projections share an input, whose 8-bit copies would take more memory than one tensor.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.recipe = recipe
        in_8_bits = (_quantize(tensor, device.e4m3) for tensor in (x, weight))
        return _scaled_matmul(*in_8_bits, by_row=device.by_row, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        e4m3, in_bfloat16 = _detect_support(grad.device.type).e4m3, ctx.recipe == "rowwise_with_gw_hp"
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _scaled_matmul(_quantize(grad, e4m3), _quantize(weight.t(), e4m3, by_row=not in_bfloat16))
        if ctx.needs_input_grad[1] and in_bfloat16:
            grad_weight = grad.t() @ x
        elif ctx.needs_input_grad[1]:
            grad_weight = _scaled_matmul(_quantize(grad.t(), e4m3), _quantize(x.t(), e4m3))
        return grad_x, grad_weight, None


def _quantize(x: Tensor, dtype: torch.dtype, *, by_row: bool = True) -> _QuantizedTensor:
    """Quantize a bfloat16 tensor [rows, columns], with any strides, to 8 bits.

    The scales are powers of two, so only the conversion to 8 bits rounds values. NaN and infinity make all values with
    the same scale NaN.
    """
    infinite = float("inf")  # the norm is the largest magnitude, in one pass over memory
    largest = torch.linalg.vector_norm(x, infinite, dim=1 if by_row else None, keepdim=True)
    most = torch.finfo(dtype).max / largest.float().clamp(min=_MIN_MAGNITUDE)
    most = most.nan_to_num_(nan=0.0)  # as for infinity: all numbers then become 0 x infinity
    scale = (most.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    rows, columns = x.shape
    padded = columns + -columns % SIZE_MULTIPLE
    make = torch.empty if padded == columns else torch.zeros
    values = make(rows, padded, dtype=dtype, device=x.device)
    torch.mul(x, scale.to(x.dtype), out=values[:, :columns])
    return _QuantizedTensor(values, scale.reciprocal())


def _scaled_matmul(
    a: _QuantizedTensor, b: _QuantizedTensor, *, by_row: bool = False, fast_accum: bool = False
) -> Tensor:
    """Return the product a b^T in bfloat16, from a [rows, k] and b [columns, k].

    Args:
        by_row: If True, the kernel applies the factors by row; if False, they are applied afterwards. Set it only
            together with `fast_accum`, because row-wise kernels without fast accumulation are slow according to
            torchao.
        fast_accum: Whether tensor cores may accumulate with less precision than float32, as is usual in forward passes.
    """
    left, right, kinds = a.values, b.values.t(), functional.ScalingType
    if by_row:
        return functional.scaled_mm(
            left, right, a.factor, kinds.RowWise, b.factor.t(), kinds.RowWise, use_fast_accum=fast_accum
        )
    one = torch.ones_like(a.factor[0])
    result = functional.scaled_mm(left, right, one, kinds.TensorWise, one, kinds.TensorWise, use_fast_accum=fast_accum)
    if b.factor.numel() == 1:
        return result.mul_(a.factor * b.factor)
    return result.mul_(a.factor).mul_(b.factor.t())


@cache
def _detect_support(kind: str) -> _Fp8Support:
    """Try FP8 matmuls on a type of device, and return the supported format and kernels.

    Raises:
        ModelError: The device supports no FP8 format.
    """
    reason = ""
    one = torch.ones(SIZE_MULTIPLE, SIZE_MULTIPLE, dtype=torch.bfloat16, device=kind)
    for e4m3 in _E4M3_FORMATS:
        try:
            both = (_quantize(one, e4m3), _quantize(one, e4m3))
            _scaled_matmul(*both)
        except (RuntimeError, ValueError) as error:
            reason = reason or str(error).strip().partition("\n")[0]
            continue
        try:
            _scaled_matmul(*both, by_row=True, fast_accum=True)
        except (RuntimeError, ValueError):
            return _Fp8Support(e4m3, by_row=False)
        return _Fp8Support(e4m3, by_row=True)
    raise ModelError(
        f"training.fp8 requires FP8 matmuls, which this {kind} device does not support ({reason}): set training.fp8 "
        "to none, or use an NVIDIA GPU of compute capability 8.9 or above (H100, L40S) or an AMD MI300"
    )
