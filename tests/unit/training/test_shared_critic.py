"""A value head on the policy's own network: one forward and one backward pass for both, the same however it is cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_helpers import VALUE_LOSS, reference_gradient, valued
from training_helpers import grads_of, logprobs_of, make_batch, make_spec, relative_error, values_of

from roll.algorithms.losses import PolicyAndValueLoss, PolicyLoss, ValueLoss
from roll.config.model import LoRAConfig
from roll.errors import CheckpointError, UnsupportedError
from roll.models import load_causal_lm
from roll.training import TorchBackend, TrainerSpec
from roll.training.precision import Precision
from roll.types import LossInputs, LossOutputs, LossRequirements

DOUBLE = Precision.from_name("float64")
LOSS = PolicyAndValueLoss(policy=PolicyLoss(), value=VALUE_LOSS, coefficient=0.3)
LAYOUTS: list[dict[str, Any]] = [
    {"share_prefix": True},
    {"share_prefix": False, "max_tokens_per_micro_batch": 1},
    {"share_prefix": True, "max_tokens_per_micro_batch": 24, "activation_checkpointing": True},
]


def spec_of(model: Path, rate: float = 1e-2, **settings: Any) -> TrainerSpec:
    return dataclasses.replace(make_spec(model, **settings), value_head_learning_rate=rate)


def set_head(backend: TorchBackend) -> tuple[torch.Tensor, float]:
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        backend.masters.get_full("value_head.weight").copy_(weight)
        backend.masters.get_full("value_head.bias").fill_(0.25)
    backend.masters.refresh()
    return weight[0], 0.25


def test_shared_critic_values_are_the_head_on_the_policys_hidden_states(tiny_model: Path) -> None:
    batch = make_batch(1)
    backend = TorchBackend(spec_of(tiny_model), precision=DOUBLE)
    assert not np.concatenate(values_of(backend, batch)).any()  # the head begins at 0
    weight, bias = set_head(backend)
    model = load_causal_lm(tiny_model, torch.float64, attention="sdpa")
    for found, sample in zip(values_of(backend, batch), batch.samples, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        before = np.flatnonzero(sample.loss_mask) - 1
        np.testing.assert_allclose(found[sample.loss_mask], (hidden @ weight + bias).numpy()[before], atol=1e-6)
        assert not found[~sample.loss_mask].any()


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_shared_critic_the_gradient_is_that_of_both_losses(tiny_model: Path, settings: dict[str, Any]) -> None:
    batch = valued(make_batch(2))
    backend = TorchBackend(spec_of(tiny_model, **settings), precision=DOUBLE)
    weight, bias = set_head(backend)
    result = backend.train_step(batch, LOSS)
    plain = TorchBackend(make_spec(tiny_model), precision=DOUBLE)
    policy = plain.train_step(batch, PolicyLoss())
    value_loss, of_value = reference_gradient(tiny_model, batch, weight, bias, clip=0.5)
    heads = {"value_head.weight": of_value.pop("score.weight"), "value_head.bias": of_value.pop("score.bias")}
    expected = {n: g + 0.3 * of_value[n] if n in of_value else g for n, g in grads_of(plain).items()}
    expected |= {n: 0.3 * g for n, g in heads.items()}
    assert result.loss == pytest.approx(policy.loss + 0.3 * value_loss, rel=1e-9)
    assert result.metrics["value/loss"] == pytest.approx(value_loss, rel=1e-9)
    assert relative_error(grads_of(backend), expected) <= 1e-6  # transformers' norms are in float32
    assert relative_error({n: expected[n] for n in grads_of(plain)}, grads_of(plain)) > 1e-2


def test_shared_critic_finite_differences_agree_with_the_gradient_in_values_and_log_probs() -> None:
    rng = np.random.default_rng(0)
    given = {n: torch.from_numpy(rng.normal(size=7)) for n in ("logprobs", "values", "old_values", "returns")}
    advantages = torch.from_numpy(rng.normal(size=7))

    def loss(logprobs: torch.Tensor, values: torch.Tensor) -> LossOutputs:
        shared = {"old_logprobs": given["logprobs"] - 0.1, "rollout_logprobs": given["logprobs"] - 0.1}
        counts = {"num_tokens": 9.0, "num_sequences": 3.0, "num_units": 3.0, "max_lengths": torch.full((2,), 8.0)}
        ids = {"sequence_ids": torch.tensor([0] * 3 + [1] * 4), "sequence_lengths": torch.tensor([3.0, 4.0]).double()}
        rest = {"old_values": given["old_values"], "returns": given["returns"], "advantages": advantages}
        return LOSS(LossInputs(logprobs=logprobs, values=values, **shared, **counts, **ids, **rest))

    moving = [given[n].clone().requires_grad_() for n in ("logprobs", "values")]
    loss(*moving).loss.backward()
    step = 1e-6
    for which, tensor in enumerate(moving):
        assert tensor.grad is not None and tensor.grad.abs().max() > 1e-3
        for i in range(7):
            ends = []
            for sign in (1, -1):
                moved = [given["logprobs"].clone(), given["values"].clone()]
                moved[which][i] += sign * step
                ends.append(loss(*moved).loss.item())
            assert tensor.grad[i].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-9)


def test_shared_critic_an_experts_tokens_have_no_value_to_learn(tiny_model: Path) -> None:
    batch = valued(make_batch(3))
    samples = [
        dataclasses.replace(s, expert=True, returns=None, old_values=None) if i % 3 == 0 else s
        for i, s in enumerate(batch.samples)
    ]

    def nothing(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss=0.0 * inputs.logprobs.sum())

    nothing.needs = LossRequirements()
    only_value = PolicyAndValueLoss(policy=nothing, value=ValueLoss(), coefficient=1.0)
    backend = TorchBackend(spec_of(tiny_model), precision=DOUBLE)
    set_head(backend)
    backend.train_step(dataclasses.replace(batch, samples=tuple(samples)), only_value)
    found = grads_of(backend)
    other = TorchBackend(spec_of(tiny_model), precision=DOUBLE)
    set_head(other)
    own = dataclasses.replace(batch, samples=tuple(s for s in samples if not s.expert))
    other.train_step(own, only_value)
    share = own.num_loss_tokens / batch.num_loss_tokens
    assert relative_error(found, {n: share * g for n, g in grads_of(other).items()}) <= 1e-6


def test_shared_critic_the_head_has_its_own_rate_and_stays_out_of_weights_and_exports(
    tiny_model: Path, tmp_path: Path
) -> None:
    backend = TorchBackend(spec_of(tiny_model, rate=1e-2, learning_rate=1e-4))
    before = {n: p.detach().clone() for n, p in backend.masters.parameters.items()}
    backend.train_step(valued(make_batch(2)), LOSS)
    moved = {n: float((p.detach() - before[n]).abs().max()) for n, p in backend.masters.parameters.items()}
    assert moved.pop("value_head.weight") == pytest.approx(1e-2, rel=1e-2)  # AdamW's first step is the rate itself
    assert moved.pop("value_head.bias") == pytest.approx(1e-2, rel=1e-2)
    assert max(moved.values()) == pytest.approx(1e-4, rel=1e-2)
    plain = TorchBackend(make_spec(tiny_model))
    assert backend.weights().names() == plain.weights().names()
    backend.export(tmp_path / "model")
    assert not any("value_head" in n for n in load_causal_lm(tmp_path / "model", torch.float32).state_dict())


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_shared_critic_a_loaded_trainer_goes_on_as_if_it_had_never_stopped(
    tiny_model: Path, tmp_path: Path, lora: Any
) -> None:
    first = TorchBackend(spec_of(tiny_model, lora=lora))
    first.train_step(valued(make_batch(1)), LOSS)
    first.save(tmp_path / "state")
    second = TorchBackend(spec_of(tiny_model, lora=lora))
    second.load(tmp_path / "state")
    assert np.concatenate(values_of(second, make_batch(4))).any()
    for pair in zip(values_of(first, make_batch(4)), values_of(second, make_batch(4)), strict=True):
        assert np.array_equal(*pair)
    results = [b.train_step(valued(make_batch(2)), LOSS) for b in (first, second)]
    assert results[0].loss == results[1].loss and results[0].grad_norm == results[1].grad_norm
    without = TorchBackend(make_spec(tiny_model, lora=lora))
    with pytest.raises(CheckpointError, match="value_head"):
        without.load(tmp_path / "state")


def test_shared_critic_log_probs_and_values_of_one_pass_are_those_of_two(tiny_model: Path) -> None:
    backend, batch = TorchBackend(spec_of(tiny_model), precision=DOUBLE), make_batch(2)
    set_head(backend)
    found = backend.forward(batch, ["logprobs", "values"])
    for name, alone in (("logprobs", logprobs_of(backend, batch)), ("values", values_of(backend, batch))):
        for own, other, sample in zip(found[name], alone, batch.samples, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-6)
            assert name == "logprobs" or not own[~sample.loss_mask].any()
        assert np.concatenate(found[name]).any()


def test_shared_critic_a_policy_without_a_head_has_no_values(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match="values"):
        values_of(TorchBackend(make_spec(tiny_model)), make_batch())
