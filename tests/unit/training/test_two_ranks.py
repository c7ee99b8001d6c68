"""Two FSDP ranks over gloo do what one rank does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_same_gradient import Reference, reference
from training_helpers import branching_batch, grads_of, make_batch, make_spec, relative_error
from two_ranks import DORA, LORA, LOSS, SMALL, run_once, run_rank
from worlds.ranks import run_ranks

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import PlacementError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", name="expected")
def _expected(tiny_model: Path) -> Reference:
    return reference(tiny_model, 0, torch.float32)


@pytest.fixture(scope="module", name="directory")
def _directory(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, expected: Reference) -> Path:
    directory = tmp_path_factory.mktemp("two ranks")
    one = TorchBackend(make_spec(tiny_model, **SMALL))
    one.train_step(expected.batch, LOSS)
    one.save(directory / "saved by one")
    run_ranks(run_rank, (directory, tiny_model, expected.batch), 2)
    return directory


@pytest.fixture(scope="module", name="found")
def _found(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "found-0.pt", weights_only=False)


@pytest.fixture(scope="module", name="other")
def _other(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "found-1.pt", weights_only=False)


@pytest.mark.parametrize("name", ["float32", "checkpointing"])
def test_two_ranks_loss_and_gradient_equal_the_reference(found: dict[str, Any], expected: Reference, name: str) -> None:
    result = found[name]["result"]
    assert abs(result.loss - expected.loss) <= 1e-5 * result.metrics["policy/loss_scale"]
    assert relative_error(found[name]["grads"], expected.grads) <= 1e-5


def test_two_ranks_in_float64_the_gradient_equals_that_of_one_rank(
    found: dict[str, Any], tiny_model: Path, expected: Reference
) -> None:
    backend = TorchBackend(make_spec(tiny_model), precision=Precision.from_name("float64"))
    result = backend.train_step(expected.batch, LOSS)
    assert found["float64"]["result"].loss == pytest.approx(result.loss, rel=1e-7)
    assert relative_error(found["float64"]["grads"], grads_of(backend)) <= 1e-6


def test_two_ranks_rollouts_whose_samples_fork_have_the_gradient_of_separate_samples(
    found: dict[str, Any], tiny_model: Path
) -> None:
    alone = TorchBackend(make_spec(tiny_model, share_prefix=False), precision=Precision.from_name("float64"))
    result = alone.train_step(branching_batch(), PolicyLoss(ratio_level="sequence"))
    assert found["branching"]["result"].num_tokens < result.num_tokens
    assert found["branching"]["result"].loss == pytest.approx(result.loss, rel=1e-7)
    assert relative_error(found["branching"]["grads"], grads_of(alone)) <= 1e-6


def test_two_ranks_every_rank_returns_the_same_step(
    found: dict[str, Any], other: dict[str, Any], tiny_model: Path
) -> None:
    result, twin = found["float32"]["result"], other["float32"]["result"]
    assert (result.loss, result.grad_norm, result.metrics) == (twin.loss, twin.grad_norm, twin.metrics)
    one = TorchBackend(make_spec(tiny_model, **SMALL)).train_step(reference(tiny_model, 0, torch.float32).batch, LOSS)
    assert result.num_loss_tokens == one.num_loss_tokens
    assert result.metrics == pytest.approx(one.metrics, rel=1e-4)
    for a, b in zip(result.logprobs, one.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_two_ranks_a_rank_without_work_adds_nothing(
    found: dict[str, Any], tiny_model: Path, expected: Reference
) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    one = dataclasses.replace(expected.batch, samples=expected.batch.samples[:1])
    result = backend.train_step(one, LOSS)
    assert found["idle rank"]["result"].loss == pytest.approx(result.loss, rel=1e-5)
    assert found["idle rank"]["result"].num_tokens == result.num_tokens
    assert relative_error(found["idle rank"]["grads"], grads_of(backend)) <= 1e-5


def test_two_ranks_bfloat16_gradients_are_reduced_in_float32_and_near_the_exact_ones(
    found: dict[str, Any], tiny_model: Path
) -> None:
    exact, one = (TorchBackend(make_spec(tiny_model, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    for backend in (exact, one):
        backend.train_step(make_batch(7), PolicyLoss())
    error_of_one = relative_error(grads_of(one), grads_of(exact))
    assert relative_error(found["bfloat16"], grads_of(exact)) <= 1.5 * error_of_one <= 0.05
    assert {g.dtype for g in found["bfloat16"].values()} == {torch.float32}


@pytest.mark.parametrize(("name", "lora"), [("lora", LORA), ("dora", DORA)])
def test_two_ranks_lora_trains_and_merges_as_on_one_rank(
    found: dict[str, Any], tiny_model: Path, expected: Reference, name: str, lora: LoRAConfig
) -> None:
    backend = TorchBackend(make_spec(tiny_model, lora=lora, **SMALL))
    backend.train_step(expected.batch, LOSS)
    assert relative_error(found[name]["grads"], grads_of(backend)) <= 1e-5
    second = backend.train_step(make_batch(2), PolicyLoss())
    assert found[f"{name} second"]["result"].loss == pytest.approx(second.loss, rel=1e-4)
    for kind, own in (("weights", backend.weights()), ("adapter", backend.adapter_weights())):
        for (label, a), (other, b) in zip(found[f"{name} second"][kind], own, strict=True):
            assert label == other
            torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=1e-5)


def test_two_ranks_only_the_first_rank_gets_weights_and_the_export_holds_them(
    found: dict[str, Any], other: dict[str, Any], directory: Path
) -> None:
    assert [name for name, _ in found["weights"]] == [name for name, _ in other["weights"]]
    assert all(tensor is None for _, tensor in other["weights"])
    exported = load_causal_lm(directory / "export", torch.float32).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in found["weights"])


def test_two_ranks_logprobs_of_every_token_are_gathered(
    found: dict[str, Any], other: dict[str, Any], expected: Reference
) -> None:
    for sample, mine, twin in zip(expected.batch.samples, found["logprobs"], other["logprobs"], strict=True):
        assert np.array_equal(mine, twin)
        assert (mine[1:] < 0).all()
        assert len(mine) == len(sample)


def test_two_ranks_saving_and_loading_under_two_ranks_goes_on_bit_for_bit(found: dict[str, Any]) -> None:
    after, again = found["after saving"]["result"], found["after loading"]["result"]
    assert (after.loss, after.grad_norm) == (again.loss, again.grad_norm)


def test_two_ranks_a_checkpoint_of_one_rank_loads_under_two(
    found: dict[str, Any], tiny_model: Path, directory: Path
) -> None:
    one = TorchBackend(make_spec(tiny_model, **SMALL))
    one.load(directory / "saved by one")
    assert found["steps"] == one.num_steps == 1
    result = one.train_step(make_batch(5), PolicyLoss())
    assert found["after loading one"]["result"].loss == pytest.approx(result.loss, rel=1e-5)
    for (name, a), (other, b) in zip(found["after loading one"]["weights"], one.weights(), strict=True):
        assert name == other
        torch.testing.assert_close(a, b.detach(), atol=2e-5, rtol=1e-4)


def test_two_ranks_a_checkpoint_of_two_ranks_loads_under_one(
    found: dict[str, Any], tiny_model: Path, directory: Path
) -> None:
    one = TorchBackend(make_spec(tiny_model, **SMALL))
    one.load(directory / "saved by two")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found["weights"], one.weights(), strict=True))
    result = one.train_step(make_batch(5), PolicyLoss())
    assert found["after saving"]["result"].loss == pytest.approx(result.loss, rel=1e-5)
    for (_, a), (_, b) in zip(found["after saving"]["weights"], one.weights(), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=2e-5, rtol=1e-4)


def test_two_ranks_several_ranks_need_a_place_to_meet(tiny_model: Path) -> None:
    spec = make_spec(tiny_model)
    alone = TrainerSpec(model_path=spec.model_path, model=spec.model, training=spec.training, world_size=2)
    with pytest.raises(PlacementError, match="init_method"):
        TorchBackend(alone)


@pytest.mark.slow
def test_two_ranks_give_the_default_model_the_reference_gradient(default_model: Path, tmp_path: Path) -> None:
    shape = {"groups": 2, "group_size": 3, "prompt": (30, 40), "response": (8, 32), "vocab": 40_000}
    expected = reference(default_model, 5, torch.float32, **shape)
    run_ranks(run_once, (tmp_path, default_model, expected.batch), 2)
    result, grads = torch.load(tmp_path / "found.pt", weights_only=False)
    assert abs(result.loss - expected.loss) <= 2e-4 * result.metrics["policy/loss_scale"]
    assert relative_error(grads, expected.grads) <= 2e-4
