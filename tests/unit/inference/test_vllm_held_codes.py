"""The codes and scales that are read back from layers of vLLM, with layers made here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.errors import ModelError
from roll.inference.vllm.quantized import QuantizedLayer, compute_held_checksums, quantize_stored, unpack_int8
from roll.weights import compute_checksum
from roll.weights.quantization import quantize


def pack(codes: Tensor) -> Tensor:
    """The layout of vLLM's int8 kernel on a CPU, one code at a time: 32 rows interleaved by 4 columns, then 32 sums."""
    rows, columns = codes.shape
    packed = torch.zeros(rows * (columns + 4), dtype=torch.int8)
    for start in range(0, rows, 32):
        count = min(32, rows - start)
        for row in range(count):
            for column in range(columns):
                inside = column // 4 * count * 4 + row * 4 + column % 4
                packed[start * (columns + 4) + inside] = codes[start + row, column]
        sums = codes[start : start + count].sum(1, dtype=torch.int32).mul(128).view(torch.int8)
        packed[start * (columns + 4) + count * columns :][: 4 * count] = sums
    return packed.view(rows, columns + 4)


def make_layer(weight: Tensor, format: str, *, packed: bool) -> tuple[QuantizedLayer, dict[str, int]]:
    """A layer that fuses two weights, and the checksums of its codes and scales."""
    codes, scales = quantize(weight, format)
    held = pack(codes) if packed else codes.t()
    module: Any = SimpleNamespace(
        weight=torch.nn.Parameter(held, requires_grad=False),
        weight_scale=torch.nn.Parameter(scales, requires_grad=False),
        logical_widths=[32, len(weight) - 32],
        input_size_per_partition=weight.shape[1],
    )
    parts = {"q": slice(32), "k": slice(32, None)}
    expected = {name: compute_checksum(codes[rows]) for name, rows in parts.items()}
    expected |= {f"{name}_scale": compute_checksum(scales[rows]) for name, rows in parts.items()}
    return QuantizedLayer(module, ("q", "k")), expected


@pytest.mark.parametrize("rows", [48, 64], ids=["a part of a block", "whole blocks"])
def test_vllm_held_codes_are_unpacked_from_the_layout_of_the_int8_kernel(rows: int) -> None:
    codes = torch.randint(-127, 128, (rows, 16), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_int8(pack(codes)), codes)


@pytest.mark.parametrize(("format", "packed"), [("int8", True), ("int8", False), ("fp8", False)])
def test_vllm_held_checksums_are_those_of_the_current_codes_and_scales(format: str, packed: bool) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))  # square: only strides tell a transpose
    layer, first = make_layer(weight, format, packed=packed)
    assert compute_held_checksums([layer]) == first
    newer, second = make_layer(-weight.flip(0), format, packed=packed)
    for name in ("weight", "weight_scale"):
        getattr(layer.module, name).data = getattr(newer.module, name).data
    assert compute_held_checksums([layer]) == second
    assert not set(first.values()) & set(second.values())


def test_vllm_held_checksums_leave_out_layers_in_an_unknown_layout() -> None:
    layer, _ = make_layer(torch.randn(48, 16), "int8", packed=True)
    layer.module.weight.data = layer.module.weight.data.reshape(-1)
    assert compute_held_checksums([layer]) == {}


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_vllm_held_codes_of_files_are_those_that_a_trainer_in_the_same_dtype_sends(format: str) -> None:
    weight, norm = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)), torch.ones(16)
    found = dict(quantize_stored([("up", weight), ("norm", norm)], {"up"}, torch.bfloat16, format))
    codes, scales = quantize(weight.bfloat16(), format)
    assert list(found) == ["up_scale", "up", "norm"] and found["norm"] is norm
    assert compute_checksum(found["up"]) == compute_checksum(codes) and torch.equal(found["up_scale"], scales)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_vllm_held_codes_of_files_with_values_that_are_not_finite_are_refused(format: str, value: float) -> None:
    weight = torch.ones(4, 4)
    weight[2, 1] = value
    with pytest.raises(ModelError, match=rf"weight 'up' has NaN or infinite values, so it cannot be .* to {format}"):
        list(quantize_stored([("up", weight)], {"up"}, torch.bfloat16, format))
    with pytest.raises(ModelError, match="the model's files have no weight 'down', which is computed in"):
        list(quantize_stored([("up", torch.ones(4, 4))], {"up", "down"}, torch.bfloat16, format))
