"""Several adapters on one base model: each trains as it would alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_helpers import logprobs_of, make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import UnsupportedError
from roll.training import TorchBackend

LORA = LoRAConfig(rank=2, alpha=6.0)


def trainer(model: Path, **settings: object) -> TorchBackend:
    return TorchBackend(make_spec(model, lora=LORA, weight_decay=0.1, **settings))


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def alone(model: Path, seeds: tuple[int, ...], **settings: object) -> TorchBackend:
    backend = trainer(model, **settings)
    for seed in seeds:
        backend.train_step(make_batch(seed), PolicyLoss())
    return backend


def same(first: TorchBackend, second: TorchBackend) -> bool:
    mine, theirs = weights_of(first), weights_of(second)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "adamw_8bit"}, {"offload_optimizer": True}, {"dtype": "bfloat16"}], ids=str
)
def test_lora_adapters_train_independently(tiny_model: Path, settings: dict[str, object]) -> None:
    backend = trainer(tiny_model, **settings)
    for name, seed in (("default", 1), ("other", 2), ("default", 3), ("third", 4), ("other", 5)):
        backend.use_adapter(name)
        result = backend.train_step(make_batch(seed), PolicyLoss())
        assert result.stepped
    for name, seeds in (("default", (1, 3)), ("other", (2, 5)), ("third", (4,)), ("new", ())):
        backend.use_adapter(name)
        assert backend.num_steps == len(seeds)
        assert same(backend, alone(tiny_model, seeds, **settings)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_adapters_keep_their_gradients_while_another_is_used(tiny_model: Path, dtype: str) -> None:
    backend, one = trainer(tiny_model, dtype=dtype), trainer(tiny_model, dtype=dtype)
    backend.forward_backward(make_batch(1), PolicyLoss())
    backend.use_adapter("other")
    with pytest.raises(ValueError, match="requires gradients"):
        backend.optim_step()
    backend.train_step(make_batch(2), PolicyLoss())
    backend.use_adapter("default")
    backend.forward_backward(make_batch(3), PolicyLoss())
    backend.optim_step()
    for seed in (1, 3):
        one.forward_backward(make_batch(seed), PolicyLoss())
    one.optim_step()
    assert same(backend, one)
    backend.use_adapter("other")
    assert same(backend, alone(tiny_model, (2,), dtype=dtype))


def test_lora_adapters_compute_their_own_logprobs(tiny_model: Path) -> None:
    backend = alone(tiny_model, (1, 2))
    trained = logprobs_of(backend, make_batch(5))
    backend.use_adapter("other")
    fresh, base = logprobs_of(backend, make_batch(5)), logprobs_of(backend, make_batch(5), adapter=False)
    assert all((a == b).all() for a, b in zip(fresh, base, strict=True))  # B begins at 0
    assert any((a != b).any() for a, b in zip(fresh, trained, strict=True))
    backend.use_adapter("default")
    assert all((a == b).all() for a, b in zip(trained, logprobs_of(backend, make_batch(5)), strict=True))


def test_lora_adapters_are_rejected_without_lora(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'other' cannot be used: the trainer has no model\.lora"):
        TorchBackend(make_spec(tiny_model)).use_adapter("other")
