"""Moments in 8 bits: rounded as they should be, blocks of rows alone, and learning as with whole ones."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from training_helpers import make_batch, make_spec
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.errors import CheckpointError
from roll.training import TorchBackend
from roll.training.distributed import Ranks
from roll.training.kernels.native import load_native_library
from roll.training.memory import adamw_8bit
from roll.training.memory.adamw_8bit import (
    AdamWConstants,
    create_moments,
    dequantize_moments,
    is_stored_in_8_bits,
    update,
)
from roll.training.optimizer import Optimizer
from roll.training.precision import MasterWeights, Precision
from roll.training.spec import TrainerSpec

CONSTANTS = AdamWConstants(learning_rate=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1)
CONFIG = TrainingConfig(num_steps=1, optimizer="adamw_8bit", weight_decay=0.0)
needs_compiler = pytest.mark.skipif(load_native_library() is None, reason="needs a C compiler")


def gradients(steps: int, *shape: int, decades: int = 4, power: int = 3) -> list[torch.Tensor]:
    """Columns of different sizes, and with a high power many entries near 0."""
    generator = torch.Generator().manual_seed(0)
    columns = 10.0 ** (decades * torch.rand(shape[-1], generator=generator) - 6)
    return [torch.randn(shape, generator=generator) ** power * columns for _ in range(steps)]


def trained(grads: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weight, moments = weight.clone(), create_moments(weight)
    for step, grad in enumerate(grads, start=1):
        update(weight, grad.to(weight.dtype), moments, step, CONSTANTS)
    return weight, moments


def test_adamw_8bit_the_values_are_those_of_the_paper() -> None:
    """Dynamic trees of 8 bits: 0, 1, and in the n-th of 7 decades 2^(n-1) parts, twice as many without signs."""
    signed, unsigned = (adamw_8bit._build_quantization_values(signed=s) for s in (True, False))
    for values, parts in ((signed, 64), (unsigned, 128)):
        assert len(values.unique()) == 256
        assert values.max() == 1.0
        assert int(((values > 0.1) & (values < 1)).sum()) == parts
        assert values[values > 0].min() > 1e-7
    assert signed[0] == -(1 - 0.9 / 128)
    assert float(unsigned[1]) == pytest.approx(0.325e-6)
    assert torch.equal(signed[:127], -signed[128:255].flip(0))


def test_adamw_8bit_moments_are_rounded_to_the_nearest_value_of_their_block() -> None:
    grads = gradients(1, 3, 300)
    _, moments = trained(grads, torch.zeros(3, 300, dtype=torch.float64))
    first, second = dequantize_moments(moments)
    for found, exact, signed in ((first, 0.1 * grads[0], True), (second, 0.01 * grads[0] ** 2, False)):
        for block in (slice(0, 256), slice(256, 300)):
            scale = exact[:, block].abs().amax(1, keepdim=True)
            distance = (
                (exact[:, block, None] / scale[..., None] - adamw_8bit._build_quantization_values(signed=signed))
                .abs()
                .amin(-1)
            )
            own = (found[:, block] - exact[:, block]).abs() / scale
            kept = own > distance + 1e-6
            assert not kept.any() if signed else (found[:, block][kept] > 0).all()  # what is above 0 stays so


@needs_compiler
def test_adamw_8bit_compiled_and_plain_updates_agree() -> None:
    grads, weight = gradients(6, 7, 600), torch.randn(7, 600)
    found, moments = trained(grads, weight)
    with mock.patch.object(adamw_8bit, "load_native_library", lambda: None):
        expected, plain = trained(grads, weight)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    for name in ("moment1_codes", "moment2_codes"):  # a tie may fall to either side
        assert float((moments[name].int() - plain[name].int()).abs().float().mean()) < 1e-3


def test_adamw_8bit_a_rank_s_rows_are_updated_as_one_rank_alone_would() -> None:
    grads, weight = gradients(4, 9, 300), torch.randn(9, 300)
    whole, moments = trained(grads, weight)
    parts = [trained([g[rows] for g in grads], weight[rows]) for rows in (slice(0, 5), slice(5, 9), slice(9, 9))]
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    for name, moment in moments.items():
        assert torch.equal(torch.cat([own[name] for _, own in parts]), moment)


def test_adamw_8bit_steps_stay_near_those_of_whole_moments() -> None:
    """Between the weights of both lies a small part of the way that they went."""
    grads, weight = gradients(30, 40, 300, decades=1, power=1), torch.randn(40, 300, dtype=torch.float64)
    exact = torch.nn.Parameter(weight.clone())
    adamw = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for grad in grads:
        exact.grad = grad.double()
        adamw.step()
    for dtype in (torch.float32, torch.float64):
        found, _ = trained(grads, weight.to(dtype))
        assert float((found - exact.detach()).norm() / (exact.detach() - weight).norm()) < 0.1


def test_adamw_8bit_a_trainer_learns_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    tiny_model = write_tiny_model(tmp_path / "model", hidden=64)
    settings = {"learning_rate": 1e-3, "optimizer": "adamw_8bit"}
    backend = TorchBackend(make_spec(tiny_model, dtype="bfloat16", **settings))
    kinds = {name: set(parts) for name, parts in backend.optimizer.get_moments().items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] >= {"moment1_codes", "moment2_scales"}
    assert kinds["model.norm.weight"] == {"moment1", "moment2"}
    plain = TorchBackend(make_spec(tiny_model, dtype="bfloat16", learning_rate=1e-3))
    for seed in range(3):
        for each in (plain, backend):
            each.train_step(make_batch(seed), PolicyLoss())
    start = dict(TorchBackend(make_spec(tiny_model, dtype="bfloat16")).masters.parameters)
    ways = [
        torch.cat([(each.masters.get_full(n) - start[n].detach().float()).flatten() for n in start])
        for each in (plain, backend)
    ]
    assert float((ways[1] - ways[0]).norm() / ways[0].norm()) < 0.1
    backend.save(tmp_path / "saved")
    again = TorchBackend(make_spec(tiny_model, dtype="bfloat16", **settings))
    again.load(tmp_path / "saved")
    for each in (backend, again):
        each._state_offloader._move(["optimizer"], torch.device("cpu"))
        each.train_step(make_batch(7), PolicyLoss())
    for name in start:
        assert torch.equal(again.masters.get_full(name), backend.masters.get_full(name))
    assert again.optimizer.get_steps() == backend.optimizer.get_steps()
    with pytest.raises(CheckpointError, match=r"training\.optimizer"):
        plain.load(tmp_path / "saved")


def test_adamw_8bit_a_weight_s_own_factor_on_the_learning_rate_holds_for_moments_of_8_bits() -> None:
    """The first step of AdamW is the learning rate itself, whatever the gradient."""
    weights = {name: torch.nn.Parameter(torch.zeros(64, 64)) for name in ("plain", "tenfold")}
    masters = MasterWeights(weights, Precision.from_name("float32"))
    ranks = Ranks(TrainerSpec(model_path="x", model=ModelConfig(path="x"), training=CONFIG), torch.device("cpu"))
    optimizer = Optimizer(masters, CONFIG, ranks, {"tenfold": 10.0})
    for weight in weights.values():
        weight.grad = torch.full_like(weight, -0.5)
    optimizer.step(1e-3, 0.1)
    for name, step in (("plain", 1e-3), ("tenfold", 1e-2)):
        torch.testing.assert_close(weights[name].detach(), torch.full((64, 64), step), rtol=1e-5, atol=0)


def test_adamw_8bit_what_is_small_keeps_whole_moments() -> None:
    assert is_stored_in_8_bits(torch.Size([64, 64])) and is_stored_in_8_bits(torch.Size([4, 32, 64]))
    assert not any(is_stored_in_8_bits(torch.Size(shape)) for shape in ([100_000], [63, 64], [4096, 16]))


def test_adamw_8bit_deepspeed_has_whole_moments_alone() -> None:
    with pytest.raises(ValueError, match=r"set training\.optimizer to adamw"):
        TrainingConfig(num_steps=1, backend="deepspeed", optimizer="adamw_8bit")
