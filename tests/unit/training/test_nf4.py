"""Frozen weights in 4 bits: read back alike everywhere, and everything but their format as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from training_helpers import branching_batch, grads_of, logprobs_of, make_batch, make_spec, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.errors import ConfigError, ModelError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.memory import nf4
from roll.training.memory.nf4 import Nf4Linear, find_nf4_layers
from roll.training.precision import Precision

QLORA = LoRAConfig(rank=2, base="nf4")
DOUBLE = Precision(compute=torch.float64, master=torch.float64)
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


def linear(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=rows % 2 == 1, dtype=dtype)
    nn.init.normal_(made.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (7, 30)])
def test_nf4_every_weight_becomes_the_nearest_of_its_block_s_values(rows: int, columns: int) -> None:
    plain = linear(rows, columns)
    found = Nf4Linear(plain)
    flat, dequantized = plain.weight.detach().flatten(), found.dequantize().flatten()
    for start in range(0, rows * columns, 64):
        own = flat[start : start + 64]
        scale = own.abs().max()
        nearest = ((own[:, None] / scale) - nf4._build_values()).abs().argmin(1)
        exact = nf4._build_values()[nearest] * scale
        assert float((dequantized[start : start + 64] - exact).norm() / exact.norm()) < 0.02  # scales have 8 bits
    assert sum(b.nbytes for b in found.buffers()) < 0.55 * flat.numel() or flat.numel() < 1000
    assert found.weight.shape == (rows, columns) and not found.weight.requires_grad


def test_nf4_scales_of_one_size_lose_nothing_by_having_8_bits() -> None:
    """What has 8 bits is how far they are from their mean: here less than a hundredth of them."""
    plain = linear(64, 64)
    blocks = plain.weight.data.view(-1, 64)
    blocks.div_(blocks.abs().amax(1, keepdim=True)).mul_(torch.linspace(0.995, 1.005, 64)[:, None])
    dequantized = Nf4Linear(plain).dequantize().view(-1, 64).abs().amax(1)
    torch.testing.assert_close(dequantized, torch.linspace(0.995, 1.005, 64), rtol=1e-4, atol=0)


def test_nf4_small_weights_keep_as_much_as_large_ones_and_zeros_stay_zeros() -> None:
    plain, small = linear(96, 64), linear(96, 64)
    small.weight.data.mul_(2.0**-30)
    assert torch.equal(Nf4Linear(small).codes, Nf4Linear(plain).codes)
    plain.weight.data[5] = 0  # a block, whose scale is read back as almost 0
    dequantized = Nf4Linear(plain).dequantize()
    assert bool((dequantized[5] == 0).all()) and bool((dequantized[4].abs() > 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_both_passes_are_those_of_the_weight_as_it_is_read(dtype: torch.dtype) -> None:
    layer = Nf4Linear(linear(33, 70, dtype))
    x = torch.randn(2, 5, 70).to(dtype).requires_grad_()
    other = x.detach().clone().requires_grad_()
    result, expected = layer(x), nn.functional.linear(other, layer.weight, layer.bias)
    grad = torch.randn_like(result)
    result.backward(grad)
    expected.backward(grad)
    assert torch.equal(result, expected) and torch.equal(x.grad, other.grad)
    with mock.patch.object(nf4, "load_native_library", lambda: None):
        assert torch.equal(layer(x), result)


def test_nf4_a_trainer_is_one_of_the_weights_that_are_read_back(tiny_model: Path, tmp_path: Path) -> None:
    """Its gradients, its reference, what engines get, and what it exports are those of a model with such weights."""
    backend = TorchBackend(make_spec(tiny_model, lora=QLORA), precision=DOUBLE)
    layers, batch = find_nf4_layers(backend.model), branching_batch()
    assert len(layers) == 2 * 7
    before = logprobs_of(backend, batch)
    same = TorchBackend(make_spec(tiny_model, lora=LoRAConfig(rank=2)), precision=DOUBLE)
    weights: dict[str, Any] = dict(same.model.named_parameters())
    for name, layer in layers.items():
        weights[name].data.copy_(layer.dequantize())
    for seed in (0, 1):
        for each in (backend, same):
            each.train_step(make_batch(seed), PolicyLoss())
    assert relative_error(grads_of(backend), grads_of(same)) <= 1e-12
    sent, expected = dict(backend.weights()), dict(same.weights())
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in sent)
    for a, b in zip(logprobs_of(backend, batch, adapter=False), before, strict=True):
        np.testing.assert_array_equal(a, b)
    backend.export(tmp_path / "model")
    exported = load_causal_lm(tmp_path / "model", torch.float32).state_dict()
    assert all(torch.equal(exported[name], sent[name]) for name in sent)


def test_nf4_states_hold_adapters_alone_and_resume_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    spec = make_spec(tiny_model, dtype="bfloat16", lora=QLORA, activation_checkpointing=True)
    backend, again = TorchBackend(spec), TorchBackend(spec)
    assert all("lora_" in name for name in backend.masters.parameters)
    backend.train_step(make_batch(0), PolicyLoss())
    backend.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    for each in (backend, again):
        each.train_step(make_batch(1), PolicyLoss())
    found, expected = dict(again.weights()), dict(backend.weights())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nf4_what_cannot_be_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"no linear layer of .* has an adapter"):
        nf4.quantize_base(nn.Sequential(nn.Linear(2, 2)))
    for change in ("training.backend=deepspeed", "training.parallel.tp=3"):
        with pytest.raises(ConfigError, match=r"4-bit weights cannot be sharded"):
            load_config(
                QUICKSTART,
                ["model.lora.base=nf4", change, "cluster.type=ray", "cluster.device_mapping.actor_train=0-2"],
            )
