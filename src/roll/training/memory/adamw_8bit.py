"""8-bit AdamW: moments that take 8 bits each (arXiv 2110.02861), 2 bytes per weight instead of 8.

    row of a weight ─ blocks of up to 256 ─ largest magnitude: the block's scale, float32
                                          └ moment / scale ─► index of the nearest of 256 values

The values are densest in the range of most moments: they cover seven decades, and each decade has more values than the
next smaller decade. Blocks lie within rows, so sharding a weight by rows does not change them. In bitsandbytes, blocks
cross rows, and the update on a CPU consists of PyTorch operations and is ten times slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from roll.training.kernels.native import load_native_library

__all__ = [
    "BLOCK_SIZE",
    "AdamWConstants",
    "create_moments",
    "dequantize_blocks",
    "dequantize_moments",
    "is_stored_in_8_bits",
    "quantize_blocks",
    "update",
]

BLOCK_SIZE = 256
MIN_ELEMENTS = 4096
"""Minimum number of elements of a weight with 8-bit moments; its rows must have at least a quarter of a block."""
_NUM_DECADES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConstants:
    """AdamW's hyperparameters for one weight's update."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def is_stored_in_8_bits(shape: torch.Size) -> bool:
    """Return whether a weight of this unsharded shape has 8-bit moments; norms, biases and thin adapters do not."""
    return len(shape) > 1 and shape[-1] >= BLOCK_SIZE // 4 and shape.numel() >= MIN_ELEMENTS


def create_moments(weight: Tensor) -> dict[str, Tensor]:
    """Create both quantized moments, filled with 0, for a rank's part of a weight.

    Codes have the weight's shape; scales are [..., number of blocks in a row].
    """
    blocks = (*weight.shape[:-1], math.ceil(weight.shape[-1] / BLOCK_SIZE))
    moments: dict[str, Tensor] = {}
    for number, values in zip(
        "12", (_build_quantization_values(signed=True), _build_quantization_values(signed=False)), strict=True
    ):
        zero = int((values == 0).nonzero()[0])
        moments[f"moment{number}_codes"] = torch.full_like(weight, zero, dtype=torch.uint8)
        moments[f"moment{number}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=weight.device)
    return moments


def dequantize_moments(moments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Dequantize the first and the second moment to float32, in the weight's shape."""
    first, second = (
        dequantize_blocks(moments[f"moment{number}_codes"], moments[f"moment{number}_scales"], signed=number == "1")
        for number in "12"
    )
    return first, second


@torch.no_grad()
def update(
    weight: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], step: int, constants: AdamWConstants
) -> None:
    """Update a weight and its moments once, in place.

    Args:
        weight: A rank's part of a weight: whole rows, in float32 or better.
        gradient: The gradient, in the weight's shape and dtype.
        moments: The result of `create_moments`.
        step: The number of this update; the first update of a weight has number 1.
        constants: AdamW's hyperparameters.
    """
    if not weight.numel():
        return
    c = constants
    # Adam's bias corrections (arXiv 1412.6980, section 3), as one factor on each moment.
    size = c.learning_rate / (1 - c.beta1**step)
    root = 1 / math.sqrt(1 - c.beta2**step)
    library = load_native_library() if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    if library is not None and weight.is_contiguous():
        tables = [
            t
            for signed in (True, False)
            for t in (_build_quantization_values(signed=signed), *_build_search_tables(signed=signed))
        ]
        decay = 1 - c.learning_rate * c.weight_decay
        shape = weight.numel() // weight.shape[-1], weight.shape[-1]
        parts = [moments[f"moment{n}_{part}"] for n in "12" for part in ("codes", "scales")]
        factors = (decay, c.beta1, 1 - c.beta1, c.beta2, 1 - c.beta2, size, root, c.epsilon)
        library.call("adamw_8bit", weight, gradient.contiguous(), *parts, *tables, *map(float, factors), *shape)
        return
    first, second = (moment.to(weight.dtype) for moment in dequantize_moments(moments))
    first.lerp_(gradient, 1 - c.beta1)
    second.mul_(c.beta2).addcmul_(gradient, gradient, value=1 - c.beta2)
    weight.mul_(1 - c.learning_rate * c.weight_decay)
    weight.addcdiv_(first, second.sqrt().mul_(root).add_(c.epsilon), value=-size)
    for number, moment in (("1", first), ("2", second)):
        codes, scales = quantize_blocks(moment, signed=number == "1")
        moments[f"moment{number}_codes"].copy_(codes)
        moments[f"moment{number}_scales"].copy_(scales)


@cache
def _build_quantization_values(*, signed: bool) -> Tensor:
    """Return the 256 quantization values, ascending, in [-1, 1] or [0, 1].

    The values are 0, 1, and the centers of equal intervals in every decade (0.1 to 1, 0.01 to 0.1, …).
    """
    values = [0.0, 1.0]
    for decade in range(_NUM_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - _NUM_DECADES)
        values += [*middles.tolist(), *(-middles if signed else middles[:0]).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def _compute_midpoints(*, signed: bool) -> Tensor:
    """Return the midpoints [255] between neighboring quantization values."""
    values = _build_quantization_values(signed=signed)
    return (values[1:] + values[:-1]) / 2


@cache
def _build_search_tables(*, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the two tables with which `fused.c` finds the nearest quantization value of a non-negative number.

    Float32 numbers with the same exponent and the same first 8 bits of the mantissa form a group. For each group, the
    first table contains the index of the quantization value that is nearest to the group's smallest number. The second
    table contains the midpoints between quantization values.
    """
    middles = _compute_midpoints(signed=signed)
    middles = torch.cat([middles[middles > 0], torch.tensor([torch.inf])])
    # Float32 from 2^-24 to 1 by exponent and the first 8 bits of the mantissa: an index without a search.
    beginnings = (torch.arange(103 << 8, (127 << 8) + 1, dtype=torch.int32) << 15).view(torch.float32)
    return torch.bucketize(beginnings, middles, out_int32=True), middles


def dequantize_blocks(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Dequantize codes [..., width] with scales [..., blocks] to float32 numbers [..., width]."""
    values = _build_quantization_values(signed=signed).to(codes.device)
    return values[codes.int()] * _expand_scales(scales, codes.shape[-1])


def quantize_blocks(numbers: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize numbers [..., width] to codes [..., width] and scales [..., blocks].

    If `signed` is false, a positive number is never rounded to 0, because AdamW would divide by epsilon if a second
    moment were 0.
    """
    numbers = numbers.float()
    width = numbers.shape[-1]
    scales = functional.pad(numbers.abs(), (0, -width % BLOCK_SIZE)).unflatten(-1, (-1, BLOCK_SIZE)).amax(-1)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = torch.bucketize(
        numbers * _expand_scales(inverse, width), _compute_midpoints(signed=signed).to(numbers.device)
    )
    if not signed:
        codes = torch.maximum(codes, (numbers > 0).to(codes.dtype))
    return codes.to(torch.uint8), scales


def _expand_scales(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_SIZE, -1)[..., :width]
