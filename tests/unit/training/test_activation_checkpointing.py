"""Keeping less for the backward pass changes no gradient and counts nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import FAMILIES, write_model
from test_architectures import WeightedLogprobs, make_trees
from test_routing import replaying
from torch import nn
from training_helpers import branching_batch, grads_of, make_spec, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.errors import ModelError
from roll.training import TorchBackend
from roll.training.memory.activation_checkpointing import tile_mlps
from roll.training.packing import blocks
from roll.training.precision import Precision

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
WAYS: dict[str, dict[str, Any]] = {
    "layers": {"activation_checkpointing": True},
    "slices": {"tiled_mlp_tokens": 7},
    "layers and slices": {"activation_checkpointing": True, "tiled_mlp_tokens": 16},
}


def test_activation_checkpointing_gradients_are_those_of_a_pass_that_keeps_everything(tiny_model: Path) -> None:
    batch, loss = branching_batch(), PolicyLoss()
    with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 2):
        plain = TorchBackend(make_spec(tiny_model), precision=DOUBLE)
        expected = plain.train_step(batch, loss)
        for way in ("slices", "layers and slices"):
            backend = TorchBackend(make_spec(tiny_model, **WAYS[way]), precision=DOUBLE)
            found = backend.train_step(batch, loss)
            assert found.loss == pytest.approx(expected.loss, abs=1e-12)
            assert relative_error(grads_of(backend), grads_of(plain)) <= 1e-12


class Mlp(nn.Module):
    """Gated, with a dropout as adapters have one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(6, 6, bias=False).double() for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.dropout(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x)))


def test_activation_checkpointing_dropout_is_the_same_when_an_mlp_runs_again() -> None:
    mlp, x = Mlp(), torch.randn(1, 10, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for whole in (True, False):
        if not whole:
            tile_mlps(mlp, 4)
        torch.manual_seed(0)
        result = torch.cat([mlp(part) for part in x.split(4, dim=1)], dim=1) if whole else mlp(x)
        torch.manual_seed(1)  # by then the state has moved on
        found.append(torch.autograd.grad(result.square().sum(), [x, *mlp.parameters()]))
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "way", ["layers and slices", *(pytest.param(way, marks=pytest.mark.slow) for way in ("layers", "slices"))]
)
def test_activation_checkpointing_routers_are_counted_once_and_replayed_alike(
    tiny_model: Path, tmp_path: Path, way: str
) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["deepseek-v3"])  # it has a shared expert, too
    plain, batch = TorchBackend(make_spec(path)), make_trees()
    experts = plain.forward(batch, ["logprobs", "experts"])["experts"]
    for own in (batch, replaying(batch, [(e + 1) % 4 * (e >= 0) - (e < 0) for e in experts])):
        plain, backend = TorchBackend(make_spec(path)), TorchBackend(make_spec(path, **WAYS[way]))
        expected, found = plain.train_step(own, WeightedLogprobs()), backend.train_step(own, WeightedLogprobs())
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
        assert np.array_equal(backend.network.routing.gather_load()[0], plain.network.routing.gather_load()[0])
        assert relative_error(grads_of(backend), grads_of(plain)) <= 1e-5


def test_activation_checkpointing_a_model_without_such_an_mlp_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    with pytest.raises(ModelError, match=r"8 is not supported for PolicyNetwork, which has no MLP"):
        TorchBackend(make_spec(path, tiled_mlp_tokens=8))
