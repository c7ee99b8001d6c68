"""QLoRA (arXiv 2305.14314): LoRA adapters on frozen weights in 4 bits (NF4).

    weight ─ blocks of 64 ─ largest magnitude: the block's scale ─ their mean, and 8 bits for the difference from it
                          └ weight / scale ─► index of the nearest of 16 values (NormalFloat): 4.1 bits in all

The 16 values divide a normal distribution into equal parts. A forward pass dequantizes a matrix into the compute dtype
and frees it afterwards; the backward pass does so again. The trained model, its reference and the engines all use the
dequantized weights, so no result depends on the original weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roll.errors import ModelError
from roll.training.kernels.native import load_native_library
from roll.training.memory.adamw_8bit import dequantize_blocks, quantize_blocks

__all__ = ["Nf4Linear", "find_nf4_layers", "quantize_base"]

BLOCK_SIZE = 64
"""Number of weights in a block of 32 bytes: the first half is in the low 4 bits, the second in the high 4 bits."""

_NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the paper's appendix E."""


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight [outputs, inputs] takes 4 bits per number.

    Args:
        linear: The layer to replace, in the compute dtype. The new layer keeps the bias as it is.
    """

    codes: Tensor
    scale_codes: Tensor
    scale_scales: Tensor
    mean: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        flat = linear.weight.detach().float().flatten()
        blocks = functional.pad(flat, (0, -len(flat) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        scales = blocks.abs().amax(1)
        mean = scales.mean()
        # Double quantization (arXiv 2305.14314, section 3): scales are positive, so their mean is subtracted.
        scale_codes, scale_scales = quantize_blocks(scales - mean, signed=True)
        found = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], _compute_midpoints()).to(torch.uint8)
        # Buffers, not parameters: FSDP does not shard them, so every rank has the whole quantized weight.
        self.register_buffer(
            "codes", found[:, : BLOCK_SIZE // 2] | (found[:, BLOCK_SIZE // 2 :] << 4), persistent=False
        )
        self.register_buffer("scale_codes", scale_codes, persistent=False)
        self.register_buffer("scale_scales", scale_scales, persistent=False)
        self.register_buffer("mean", mean, persistent=False)

    @property
    def weight(self) -> nn.Parameter:
        """A dequantized copy of the weight, in the compute dtype."""
        return nn.Parameter(self.dequantize(), requires_grad=False)

    def dequantize(self) -> Tensor:
        """Return the dequantized weight [outputs, inputs]."""
        scales = dequantize_blocks(self.scale_codes, self.scale_scales, signed=True) + self.mean
        count = self.out_features * self.in_features
        library = load_native_library() if self.codes.device.type == "cpu" and self.dtype == torch.bfloat16 else None
        if library is not None:
            result = torch.empty(len(self.codes), BLOCK_SIZE, dtype=torch.bfloat16)
            library.call("nf4_dequantize", self.codes, scales, _build_values(), result, len(self.codes))
        else:
            values = _build_values().to(self.codes.device)
            halves = [values[part.int()] for part in (self.codes & 15, self.codes >> 4)]
            result = (torch.cat(halves, 1) * scales[:, None]).to(self.dtype)
        return result.flatten()[:count].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs […, outputs] of inputs […, inputs]."""
        return _Linear.apply(x, self)


class _Linear(torch.autograd.Function):
    """A linear function that dequantizes the weight in the forward and again in the backward pass, to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.dequantize(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.dequantize(), None


def quantize_base(model: nn.Module) -> None:
    """Quantize the weights of a model's adapted layers to 4 bits, one by one; layers without an adapter stay unchanged.

    Raises:
        ModelError: No adapter is on a linear layer.
    """
    from peft.tuners.lora import LoraLayer

    adapted: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer) and type(m.base_layer) is nn.Linear]
    if not adapted:
        raise ModelError(
            f"model.lora.base is nf4, but no linear layer of {type(model).__name__} has an adapter: set "
            "model.lora.base to as_is"
        )
    for layer in adapted:
        layer.base_layer = Nf4Linear(layer.base_layer)


def find_nf4_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """Return the 4-bit layers of a model, by the parameter name of the original weight."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, Nf4Linear)}


@cache
def _build_values() -> Tensor:
    return torch.tensor(_NF4_VALUES, dtype=torch.float32)


@cache
def _compute_midpoints() -> Tensor:
    values = _build_values()
    return (values[1:] + values[:-1]) / 2
