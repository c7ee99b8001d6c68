"""A reference is the policy as it was at first, and holds nothing for training; without adapters the policy is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import logprobs_of, make_batch, make_spec
from worlds.ranks import run_ranks

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import UnsupportedError
from roll.training import TorchBackend, TrainerSpec

LORA = LoRAConfig(rank=4)


def reference_spec(model: Path, **settings: Any) -> TrainerSpec:
    return dataclasses.replace(make_spec(model, **settings), role="reference")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_reference_policy_it_says_what_the_policy_said_at_first_bit_for_bit(
    tiny_model: Path, dtype: str, lora: LoRAConfig | None
) -> None:
    batch = make_batch(1)
    settings = {"dtype": dtype, "max_tokens_per_micro_batch": 60}
    reference = TorchBackend(reference_spec(tiny_model, lora=lora, **settings))
    policy = TorchBackend(make_spec(tiny_model, learning_rate=0.01, **settings))
    first = logprobs_of(policy, batch)
    for found, expected in zip(logprobs_of(reference, batch), first, strict=True):
        assert np.array_equal(found, expected)
    policy.train_step(batch, PolicyLoss())
    assert any(not np.array_equal(a, b) for a, b in zip(logprobs_of(policy, batch), first, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_policy_it_holds_the_models_weights_in_the_compute_dtype_and_nothing_else(
    tiny_model: Path, dtype: str
) -> None:
    backend = TorchBackend(reference_spec(tiny_model, dtype=dtype))
    logprobs_of(backend, make_batch())
    assert backend.masters.parameters == {}
    assert backend.optimizer.get_moments() == {}
    weights = list(backend.network.parameters())
    assert {p.dtype for p in weights} == {getattr(torch, dtype)}
    assert not any(p.requires_grad or p.grad is not None for p in weights)


def test_reference_policy_it_cannot_be_trained(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match="role 'reference' does not support train_step: use a policy or critic"):
        TorchBackend(reference_spec(tiny_model)).train_step(make_batch(), PolicyLoss())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_policy_a_trained_policy_without_its_adapters_is_the_base_model_bit_for_bit(
    tiny_model: Path, dtype: str
) -> None:
    batch = make_batch(2)
    expected = logprobs_of(TorchBackend(reference_spec(tiny_model, dtype=dtype)), batch)
    policy = TorchBackend(make_spec(tiny_model, dtype=dtype, lora=LORA, learning_rate=0.02))
    for _ in range(3):
        policy.train_step(batch, PolicyLoss())
    trained = logprobs_of(policy, batch)
    for found, base in zip(logprobs_of(policy, batch, adapter=False), expected, strict=True):
        assert np.array_equal(found, base)
    assert max(np.abs(a - b).max() for a, b in zip(trained, expected, strict=True)) > 0.1
    for again, before in zip(logprobs_of(policy, batch), trained, strict=True):  # and the adapters are back
        assert np.array_equal(again, before)


def test_reference_policy_scoring_without_adapters_changes_no_later_step(tiny_model: Path) -> None:
    scored, left = (TorchBackend(make_spec(tiny_model, lora=LORA)) for _ in range(2))
    for seed in range(3):
        logprobs_of(scored, make_batch(9), adapter=False)
        results = [backend.train_step(make_batch(seed), PolicyLoss()) for backend in (scored, left)]
        assert (results[0].loss, results[0].grad_norm) == (results[1].loss, results[1].grad_norm)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(scored.weights(), left.weights(), strict=True))


def test_reference_policy_without_adapters_there_is_nothing_to_leave_out(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="no adapters to disable"):
        logprobs_of(TorchBackend(make_spec(tiny_model)), make_batch(), adapter=False)


def score_on_two_ranks(rank: int, directory: Path, model: Path) -> None:
    """A reference, and a policy with its adapters left out before and after a step, on two ranks."""
    meeting = f"file://{directory / 'meeting'}"

    def build(spec: TrainerSpec) -> TorchBackend:
        return TorchBackend(dataclasses.replace(spec, rank=rank, world_size=2, init_method=meeting))

    batch, small = make_batch(4), {"max_tokens_per_micro_batch": 30}
    reference = build(reference_spec(model, dtype="bfloat16", **small))
    shards = {p.dtype for p in reference.network.parameters()}
    found: dict[str, Any] = {"reference": logprobs_of(reference, batch), "dtypes": shards}
    policy = build(make_spec(model, lora=LORA, learning_rate=0.02, **small))
    found["before"] = logprobs_of(policy, batch, adapter=False)  # also before FSDP has seen a step
    found["result"] = policy.train_step(batch, PolicyLoss())
    found["second"] = policy.train_step(batch, PolicyLoss())
    found["after"] = logprobs_of(policy, batch, adapter=False)
    found["adapted"] = logprobs_of(policy, batch)
    torch.save(found, directory / f"found-{rank}.pt")
    policy.close()


@pytest.mark.slow  # `test_parallel` has frozen references under more layouts
def test_reference_policy_two_ranks_score_as_one_and_go_on_training(tiny_model: Path, tmp_path: Path) -> None:
    run_ranks(score_on_two_ranks, (tmp_path, tiny_model), 2)
    found = torch.load(tmp_path / "found-0.pt", weights_only=False)
    batch = make_batch(4)
    exact = logprobs_of(TorchBackend(reference_spec(tiny_model)), batch)
    half = logprobs_of(TorchBackend(reference_spec(tiny_model, dtype="bfloat16")), batch)
    assert found["dtypes"] == {torch.bfloat16}
    policy = TorchBackend(make_spec(tiny_model, lora=LORA, learning_rate=0.02))
    results = [policy.train_step(batch, PolicyLoss()) for _ in range(2)]
    assert found["result"].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
    assert found["second"].loss == pytest.approx(results[1].loss, rel=1e-3, abs=1e-5)
    for name, expected, limit in (
        ("reference", half, 0.1),
        ("before", exact, 1e-4),
        ("after", exact, 1e-4),
        ("adapted", logprobs_of(policy, batch), 0.02),
    ):
        for mine, base in zip(found[name], expected, strict=True):
            np.testing.assert_allclose(mine, base, atol=limit, err_msg=name)
    for a, b in zip(found["before"], found["after"], strict=True):
        assert np.array_equal(a, b)
    assert max(np.abs(a - b).max() for a, b in zip(found["adapted"], found["after"], strict=True)) > 0.1
