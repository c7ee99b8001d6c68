"""AdamW whose moments take 8 bits each (arXiv 2110.02861): 2 bytes per weight instead of 8.

    row of a weight ─ blocks of up to 256 ─ largest magnitude: the block's scale, float32
                                          └ moment / scale ─► index of the nearest of 256 values

The values are dense where moments are: seven decades, each divided more finely than the one below it. Blocks lie within
rows, so a rank with some of a weight's rows has the same blocks as a single rank would have for them. The blocks of
bitsandbytes cross rows, and its update on a CPU consists of PyTorch operations and takes ten times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from roll.training.kernels.native import native

__all__ = [
    "BLOCK",
    "AdamWConstants",
    "new_moments",
    "read_blocks",
    "read_moments",
    "update",
    "uses_8_bits",
    "write_blocks",
]

BLOCK = 256
MIN_ELEMENTS = 4096
"""Smallest weight with 8-bit moments; its rows must have at least a quarter of a block."""
_DECADES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConstants:
    """AdamW's constants of one weight's update."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def uses_8_bits(shape: torch.Size) -> bool:
    """Return whether the moments of a whole weight are kept in 8 bits; those of norms, biases and thin adapters are
    not.
    """
    return len(shape) > 1 and shape[-1] >= BLOCK // 4 and shape.numel() >= MIN_ELEMENTS


def new_moments(weight: Tensor) -> dict[str, Tensor]:
    """Return both moments of a rank's part of a weight, all 0: codes in the weight's shape, scales [..., blocks of a
    row].
    """
    blocks = (*weight.shape[:-1], math.ceil(weight.shape[-1] / BLOCK))
    found: dict[str, Tensor] = {}
    for number, values in zip(
        "12", (_quantization_values(signed=True), _quantization_values(signed=False)), strict=True
    ):
        zero = int((values == 0).nonzero()[0])
        found[f"moment{number}_codes"] = torch.full_like(weight, zero, dtype=torch.uint8)
        found[f"moment{number}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=weight.device)
    return found


def read_moments(moments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Dequantize the first and the second moment to float32, in the weight's shape."""
    first, second = (
        read_blocks(moments[f"moment{number}_codes"], moments[f"moment{number}_scales"], signed=number == "1")
        for number in "12"
    )
    return first, second


@torch.no_grad()
def update(
    weight: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], step: int, constants: AdamWConstants
) -> None:
    """Update a weight and its moments once, in place.

    Args:
        weight: A rank's part of a weight; rows in float32 or better.
        gradient: The gradient, in the weight's shape and dtype.
        moments: The result of `new_moments`.
        step: The number of this update of the weight, from 1 on.
        constants: The constants of AdamW.
    """
    if not weight.numel():
        return
    c = constants
    size = c.learning_rate / (1 - c.beta1**step)
    root = 1 / math.sqrt(1 - c.beta2**step)
    library = native() if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    if library is not None and weight.is_contiguous():
        tables = [
            t for signed in (True, False) for t in (_quantization_values(signed=signed), *_search_tables(signed=signed))
        ]
        decay = 1 - c.learning_rate * c.weight_decay
        shape = weight.numel() // weight.shape[-1], weight.shape[-1]
        parts = [moments[f"moment{n}_{part}"] for n in "12" for part in ("codes", "scales")]
        factors = (decay, c.beta1, 1 - c.beta1, c.beta2, 1 - c.beta2, size, root, c.epsilon)
        library.call("adamw_8bit", weight, gradient.contiguous(), *parts, *tables, *map(float, factors), *shape)
        return
    first, second = (moment.to(weight.dtype) for moment in read_moments(moments))
    first.lerp_(gradient, 1 - c.beta1)
    second.mul_(c.beta2).addcmul_(gradient, gradient, value=1 - c.beta2)
    weight.mul_(1 - c.learning_rate * c.weight_decay)
    weight.addcdiv_(first, second.sqrt().mul_(root).add_(c.epsilon), value=-size)
    for number, moment in (("1", first), ("2", second)):
        codes, scales = write_blocks(moment, signed=number == "1")
        moments[f"moment{number}_codes"].copy_(codes)
        moments[f"moment{number}_scales"].copy_(scales)


@cache
def _quantization_values(*, signed: bool) -> Tensor:
    """Return the 256 values, ascending, in [-1, 1] or [0, 1]: 0, 1, and in every decade the middles of equal parts."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        found += [*middles.tolist(), *(-middles if signed else middles[:0]).tolist()]
    return torch.tensor(sorted(found), dtype=torch.float32)


@cache
def _midpoints(*, signed: bool) -> Tensor:
    """Return the midpoints [255] between neighboring values."""
    values = _quantization_values(signed=signed)
    return (values[1:] + values[:-1]) / 2


@cache
def _search_tables(*, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the search tables of `fused.c` for the values from 0 on.

    The first table has the index of the value nearest to the beginning of each part of a power of two, the second one
    the midpoints between values.
    """
    middles = _midpoints(signed=signed)
    middles = torch.cat([middles[middles > 0], torch.tensor([torch.inf])])
    beginnings = (torch.arange(103 << 8, (127 << 8) + 1, dtype=torch.int32) << 15).view(torch.float32)
    return torch.bucketize(beginnings, middles, out_int32=True), middles


def read_blocks(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Dequantize codes [..., width] with scales [..., blocks] to float32 numbers [..., width]."""
    values = _quantization_values(signed=signed).to(codes.device)
    return values[codes.int()] * _expand_scales(scales, codes.shape[-1])


def write_blocks(numbers: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize numbers [..., width] to codes and scales.

    Without signs, a number above 0 stays above 0: otherwise a weight's step would be divided by epsilon alone.
    """
    numbers = numbers.float()
    width = numbers.shape[-1]
    scales = functional.pad(numbers.abs(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK)).amax(-1)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    found = torch.bucketize(numbers * _expand_scales(inverse, width), _midpoints(signed=signed).to(numbers.device))
    if not signed:
        found = torch.maximum(found, (numbers > 0).to(found.dtype))
    return found.to(torch.uint8), scales


def _expand_scales(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, -1)[..., :width]
