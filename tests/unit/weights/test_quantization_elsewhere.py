"""Quantized weights against those that compressed-tensors and vLLM compute from the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from weight_helpers import same_bytes

from roll.weights.quantization import FORMATS, dequantize, quantize

WEIGHT = torch.randn(33, 64, generator=torch.Generator().manual_seed(0))


def replace_row(values: Tensor | float) -> Tensor:
    weight = WEIGHT.clone()
    weight[3] = values
    return weight


WEIGHTS = {
    "float32": WEIGHT,
    "bfloat16": WEIGHT.bfloat16(),
    "float16": WEIGHT.half(),
    "a row of zeros": replace_row(0.0),
    "a row of -0": replace_row(-0.0),
    "an outlier": replace_row(torch.eye(64)[7] * 3e38 + 1.0),
    "an outlier in bfloat16": replace_row(torch.eye(64)[7] * 3e38 + 1.0).bfloat16(),
    "halves": torch.cat([torch.arange(-127, 128) / 2, torch.tensor([127.0])])[None],
    "halves in bfloat16": torch.cat([torch.arange(-127, 128) / 2, torch.tensor([127.0])])[None].bfloat16(),
    "small numbers": WEIGHT * 1e-30,
}


def by_compressed_tensors(weight: Tensor, format: str) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Codes and scales in float32, and the function that computes codes from other scales."""
    arguments = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_elsewhere
    from compressed_tensors.quantization.utils import calculate_qparams

    kind = arguments.QuantizationArgs(
        num_bits=8, type="int" if format == "int8" else "float", symmetric=True, strategy="channel"
    )
    x = weight.float()
    scales, zero = calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), kind)

    def compute_codes(scales: Tensor) -> Tensor:
        codes: Tensor = quantize_elsewhere(x, scales, zero, kind, dtype=FORMATS[format][0])
        return codes

    return compute_codes(scales), scales, compute_codes


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_weight_quantization_fp8_equals_compressed_tensors(weight: Tensor) -> None:
    codes, scales = quantize(weight, "fp8")
    expected, its_scales, _ = by_compressed_tensors(weight, "fp8")
    nonzero = weight.ne(0).any(1)
    assert same_bytes(scales[nonzero], its_scales[nonzero])
    assert same_bytes(codes[nonzero], expected[nonzero])
    assert not dequantize(codes, scales, torch.float32)[~nonzero].any()


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_weight_quantization_int8_codes_equal_compressed_tensors(weight: Tensor) -> None:
    """Its own scales use the code -128 as well: they are 127 / 127.5 of ours."""
    codes, scales = quantize(weight, "int8")
    _, its_scales, compute_codes = by_compressed_tensors(weight, "int8")
    nonzero = weight.ne(0).any(1)
    assert torch.allclose(its_scales[nonzero] * 127.5, scales[nonzero] * 127, rtol=1e-6, atol=0)
    assert same_bytes(codes, compute_codes(scales))


@pytest.mark.vllm
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_weight_quantization_int8_equals_vllm_activation_quantization(weight: Tensor) -> None:
    """The kernel computes one scale per token, as quantization of weights does per output channel."""
    operations = pytest.importorskip("vllm._custom_ops")
    codes, scales = quantize(weight, "int8")
    expected, its_scales, _ = operations.scaled_int8_quant(weight.contiguous())
    nonzero = weight.ne(0).any(1)
    assert same_bytes(codes, expected)
    assert same_bytes(scales[nonzero], its_scales[nonzero])
