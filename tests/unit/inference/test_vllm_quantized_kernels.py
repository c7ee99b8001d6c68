"""The int8 product of vLLM on CPUs without AMX."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roll.inference.vllm.quantized_kernels import _build_int8_kernel
from roll.weights.quantization import dequantize, quantize

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_vllm_quantized_kernel_int8_computes_with_the_scales_after_the_layer_has_lost_them() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig

    generator = torch.Generator().manual_seed(0)
    codes, scales = quantize(torch.randn(48, 64, generator=generator), "int8")
    inputs = torch.randn(5, 64, generator=generator)
    expected = inputs @ dequantize(codes, scales, torch.float32).t()
    layer: Any = nn.Module()
    layer.weight, layer.weight_scale = (nn.Parameter(each, requires_grad=False) for each in (codes, scales))
    layer.input_scale = layer.input_zero_point = layer.azp_adj = None
    layer.logical_widths = [48]
    config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme=False, is_channelwise=True, input_symmetric=True)
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    kernel = _build_int8_kernel()(config, layer_param_names=names)
    kernel.process_weights_after_loading(layer)  # with oneDNN: the default dtype is float32
    del codes, scales
    layer.weight_scale = None
    noise = [torch.full((48, 1), torch.nan) for _ in range(500)]  # uses the memory of the scales, if it is free
    found = kernel.apply_weights(layer, inputs)
    assert len(noise) == 500
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
