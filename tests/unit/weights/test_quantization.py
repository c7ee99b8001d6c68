"""Linear weights in codes: what they stand for, what travels, and that an engine computes with nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from weight_helpers import DictSource, same_bytes

from roll.errors import WeightSyncError
from roll.weights import Sender, open_update
from roll.weights.plan import describe_tensor
from roll.weights.quantization import (
    QuantizedWeights,
    dequantize,
    dequantize_stream,
    drop_scales,
    find_quantized_dtype,
    quantize,
)

E4M3 = np.array(
    sorted(
        [m / 8 * 2.0**-6 for m in range(8)]  # subnormal
        + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    )
)
"""Every magnitude of the format (OCP OFP8, table 1)."""


def test_weight_quantization_int8_by_hand():
    weight = torch.tensor([[0.5, -1.27, 0.004, 0.015], [0.0, 0.0, 0.0, 0.0], [2.0, 2.54, -2.54, 0.01]])
    codes, scales = quantize(weight, "int8")
    assert codes.tolist() == [[50, -127, 0, 2], [0, 0, 0, 0], [100, 127, -127, 0]]  # halves go to even codes
    assert scales.shape == (3, 1) and scales.dtype == torch.float32
    assert scales[:, 0].tolist() == pytest.approx([0.01, torch.finfo(torch.float32).tiny, 0.02])
    back = dequantize(codes, scales, torch.float32)
    assert back.numpy() == pytest.approx(np.array([[0.5, -1.27, 0, 0.02], [0] * 4, [2.0, 2.54, -2.54, 0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_quantization_int8_rounds_halves_to_even_codes(dtype: torch.dtype):
    weight = torch.tensor([[0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 127.0]], dtype=dtype)  # the scale is 1
    assert quantize(weight, "int8")[0].tolist() == [[0, 2, 2, 4, 0, -2, -2, 127]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_quantization_fp8_rounds_to_nearest(dtype: torch.dtype):
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = quantize(weight, "fp8")
    assert codes.dtype == torch.float8_e4m3fn
    shares = weight.double().abs().numpy() / weight.double().abs().amax(1, keepdim=True).numpy() * 448
    nearest = E4M3[np.abs(shares[..., None] - E4M3).argmin(-1)]
    assert (codes.double().abs().numpy() == nearest).all()
    assert torch.equal(codes.double().sign()[codes.double() != 0], weight.double().sign()[codes.double() != 0])
    assert scales.double().numpy() == pytest.approx(weight.double().abs().amax(1, keepdim=True).numpy() / 448)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_weight_quantization_read_back_has_the_same_codes(format: str):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize(weight, format)
    again, _ = quantize(dequantize(codes, scales, torch.float32), format)
    assert same_bytes(codes, again)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-44])
def test_weight_quantization_keeps_nonfinite_rows_nonfinite_and_tiny_rows_finite(format: str, value: float):
    weight = torch.tensor([[value, 1e-45], [1.0, 0.5]])
    back = dequantize(*quantize(weight, format), torch.float32)
    assert bool(back[0].isfinite().all()) == (value < 1)
    assert back[1, 0] == 1


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    names = {"embed": torch.bfloat16, "up": torch.bfloat16, "norm": torch.float32, "down": torch.bfloat16}
    return {name: torch.randn(4, 6, generator=generator).to(dtype) for name, dtype in names.items()}


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_weight_quantization_engine_reads_back_the_sent_bits(format: str, transport: str):
    sender, source = Sender(), QuantizedWeights(DictSource(tensors()), format, {"up", "down"})
    update = sender.stage(source, 1, transport)
    assert update is not None
    assert [spec.name for spec in update.manifest] == source.names()
    assert source.names() == ["embed", "up_scale", "up", "norm", "down_scale", "down"]
    assert [spec.name for spec in drop_scales(update.manifest)] == ["embed", "up", "norm", "down"]
    assert find_quantized_dtype(update.manifest) == ("int8" if format == "int8" else "float8_e4m3fn")
    with open_update(update) as receiver:
        found = {n: t.clone() for n, t in dequantize_stream(receiver, update.manifest, torch.bfloat16)}
    assert receiver.checksums == sender.send()
    assert receiver.num_bytes == 4 * 6 * (2 + 1 + 4 + 1) + 2 * 4 * 4
    sender.close()
    for name, weight in tensors().items():
        sent = dequantize(*quantize(weight, format), torch.bfloat16) if name in ("up", "down") else weight
        assert same_bytes(found[name], sent)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_weight_quantization_every_iteration_quantizes_the_current_weights(format: str):
    held = tensors()
    source = QuantizedWeights(DictSource(held), format, {"up"})
    before = {name: tensor.clone() for name, tensor in source}
    held["up"].mul_(-2)  # in place, as an optimizer step
    after = dict(source)
    codes, scales = quantize(tensors()["up"] * -2, format)
    assert same_bytes(after["up"], codes) and same_bytes(after["up_scale"], scales)
    assert not same_bytes(after["up"], before["up"])


def test_weight_quantization_other_ranks_iterate_the_same_names():
    source = QuantizedWeights(DictSource(dict.fromkeys(tensors())), "int8", {"up"})  # type: ignore[arg-type]
    assert list(source) == [("embed", None), ("up_scale", None), ("up", None), ("norm", None), ("down", None)]


@pytest.mark.parametrize("scales", [None, torch.ones(3, 1), torch.ones(1, 1), torch.ones(4, 6), torch.ones(4)])
def test_weight_quantization_codes_without_scales_are_rejected(scales: torch.Tensor | None):
    offered = {"up_scale": scales, "up": torch.ones(4, 6, dtype=torch.int8)}
    sender = Sender()
    update = sender.stage(DictSource({n: t for n, t in offered.items() if t is not None}), 1, "in_process")
    assert update is not None
    with (
        pytest.raises(WeightSyncError, match="tensor 'up' was received as int8 codes"),
        open_update(update) as receiver,
    ):
        list(dequantize_stream(receiver, update.manifest, torch.float32))
    sender.close()


def test_weight_quantization_scales_survive_buffer_reuse():
    codes, scales = quantize(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "int8")
    manifest = [describe_tensor("up_scale", scales), describe_tensor("up", codes)]
    expected, buffer = dequantize(codes, scales, torch.float32), scales.clone()

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        yield "up_scale", buffer
        buffer.zero_()  # the next bucket
        yield "up", codes

    assert [(n, t.tolist()) for n, t in dequantize_stream(arriving(), manifest, torch.float32)] == [
        ("up", expected.tolist())
    ]


def test_weight_quantization_weight_named_like_a_scale_is_a_weight():
    offered = {"up": torch.ones(4, 6), "up_scale": torch.ones(4, 1)}
    sender = Sender()
    update = sender.stage(DictSource(offered), 1, "in_process")
    assert update is not None and find_quantized_dtype(update.manifest) is None
    with open_update(update) as receiver:
        assert [name for name, _ in dequantize_stream(receiver, update.manifest, torch.float32)] == ["up", "up_scale"]
    sender.close()
