"""A loss that asks for entropy or for the divergence from the reference gets the exact ones, with their gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import grads_of, make_batch, make_spec, relative_error

from roll.algorithms.correction import Correction
from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.network.lora import find_adapters
from roll.training.precision import Precision
from roll.types import LossInputs, LossOutputs, LossRequirements, TrainingBatch

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
BARE = Correction(upper=None)
BONUS = PolicyLoss(correction=BARE, entropy_coefficient=0.3)
PENALTY = PolicyLoss(correction=BARE, kl_coefficient=0.2, kl_estimator="full")
BOTH = PolicyLoss(correction=BARE, entropy_coefficient=0.3, kl_coefficient=0.2, kl_estimator="full")
SHAPE = {"groups": 3, "group_size": 3}
LAYOUTS: list[dict[str, Any]] = [
    {"share_prefix": True},
    {"share_prefix": False, "max_tokens_per_micro_batch": 1},
    {"share_prefix": True, "max_tokens_per_micro_batch": 30, "activation_checkpointing": True},
]


def distributions(model: Any, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """[L - 1, V] log-probs of one sample by transformers alone."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)


def dense_loss(model: Any, reference: Any, batch: TrainingBatch, loss: PolicyLoss) -> torch.Tensor:
    """Policy gradient at ratio 1, minus the bonus, plus the penalty; mean over tokens, then over sequences."""
    terms = []
    for sample in batch.samples:
        logp = distributions(model, sample.token_ids, batch.temperature)
        with torch.no_grad():
            logq = distributions(reference, sample.token_ids, batch.temperature)
        at = np.flatnonzero(sample.loss_mask) - 1
        chosen = logp[at, sample.token_ids[at + 1].astype(np.int64)]
        total = torch.from_numpy(sample.advantages[at + 1]).double() * (chosen - chosen.detach()).exp()
        p = logp[at].exp()
        total = total - loss.entropy_coefficient * (p * logp[at]).sum(1)
        total = total - loss.kl_coefficient * (p * (logp[at] - logq[at])).sum(1)
        terms.append(total.mean())
    return -torch.stack(terms).mean()


def moved(spec: Any) -> TorchBackend:
    """A trainer whose policy has left its reference."""
    backend = TorchBackend(spec, precision=DOUBLE)
    backend.train_step(make_batch(1, **SHAPE), PolicyLoss(correction=BARE))
    return backend


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda s: "-".join(f"{k[:5]}={v}" for k, v in s.items()))
@pytest.mark.parametrize("loss", [BONUS, PENALTY, BOTH], ids=["entropy", "full_kl", "both"])
def test_entropy_and_kl_loss_and_gradient_equal_the_dense_ones(
    tiny_model: Path, loss: PolicyLoss, settings: dict[str, Any]
) -> None:
    spec = dataclasses.replace(make_spec(tiny_model, **settings), holds_reference=True)
    backend = moved(spec)
    model = load_causal_lm(tiny_model, torch.float64, attention="sdpa")
    reference = load_causal_lm(tiny_model, torch.float64, attention="sdpa")
    model.load_state_dict({n: p.detach().clone() for n, p in backend.model.named_parameters()}, strict=False)
    model.tie_weights()
    batch = make_batch(2, **SHAPE)
    expected = dense_loss(model, reference, batch, loss)
    expected.backward()
    result = backend.train_step(batch, loss)
    assert result.loss == pytest.approx(expected.item(), rel=1e-7)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative_error(grads_of(backend), grads) <= 1e-7
    if loss.kl_coefficient:
        assert result.metrics["policy/kl_reference"] > 1e-4


@pytest.mark.parametrize("loss", [PENALTY, BOTH], ids=["full_kl", "both"])
def test_entropy_and_kl_with_adapters_the_reference_is_the_model_below_them(tiny_model: Path, loss: PolicyLoss) -> None:
    spec = make_spec(tiny_model, lora=LoRAConfig(rank=4, dropout=0.5), learning_rate=0.05)
    spec = dataclasses.replace(spec, holds_reference=True)
    backend = moved(spec)
    assert backend.network.reference is None
    for module in backend.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # what it drops cannot be known to the reference below
    model = load_causal_lm(tiny_model, torch.float64, attention="sdpa")
    model.load_state_dict({n: t.detach().double() for n, t in backend.weights()}, strict=False)
    model.tie_weights()
    parts = {name: parameter.detach().clone() for name, parameter in backend.model.named_parameters()}
    batch = make_batch(2, **SHAPE)
    expected = dense_loss(model, load_causal_lm(tiny_model, torch.float64, attention="sdpa"), batch, loss)
    expected.backward()
    result = backend.train_step(batch, loss)
    assert result.metrics["policy/kl_reference"] > 1e-3
    # merging rounds to float32, the dtype of the engines
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    grads = {n: p.grad for n, p in model.named_parameters()}
    chained = {}
    for name, adapter in find_adapters(backend.model).items():  # W + scale B A
        chained[adapter.b] = adapter.scale * grads[name] @ parts[adapter.a].t()
        chained[adapter.a] = adapter.scale * parts[adapter.b].t() @ grads[name]
    assert relative_error(grads_of(backend), chained) <= 1e-5


def test_entropy_and_kl_before_the_first_update_the_divergence_and_its_gradient_are_nothing(tiny_model: Path) -> None:
    batch = make_batch(**SHAPE)
    spec = make_spec(tiny_model, dtype="bfloat16")
    plain = TorchBackend(spec)
    plain.train_step(batch, PolicyLoss(correction=BARE))
    backend = TorchBackend(dataclasses.replace(spec, holds_reference=True))
    result = backend.train_step(batch, PENALTY)
    assert result.metrics["policy/kl_reference"] == 0.0
    assert relative_error(grads_of(backend), grads_of(plain)) <= 5e-3  # another order of rounding, in bfloat16


def test_entropy_and_kl_the_reference_stays_and_is_no_part_of_what_is_trained_saved_or_sent(
    tiny_model: Path, tmp_path: Path
) -> None:
    spec = dataclasses.replace(make_spec(tiny_model), holds_reference=True)
    backend = TorchBackend(spec)
    before = {n: p.clone() for n, p in backend.network.reference.named_parameters()}
    plain = TorchBackend(make_spec(tiny_model))
    backend.train_step(make_batch(**SHAPE), PENALTY)
    for name, parameter in backend.network.reference.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert not parameter.requires_grad
    assert backend.weights().names() == plain.weights().names()
    assert backend.masters.parameters.keys() == plain.masters.parameters.keys()
    backend.save(tmp_path)
    plain.load(tmp_path)  # resumes also without a reference
    twin = TorchBackend(spec)
    twin.load(tmp_path)
    results = [b.train_step(make_batch(4, **SHAPE), PENALTY) for b in (backend, twin)]
    assert results[0] == dataclasses.replace(results[1], timings_s=results[0].timings_s, logprobs=results[0].logprobs)
    assert results[0].metrics["policy/kl_reference"] > 0


def test_entropy_and_kl_a_loss_that_asks_for_nothing_gets_nothing(tiny_model: Path) -> None:
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> LossOutputs:
        seen.append(inputs)
        return PolicyLoss()(inputs)

    loss.needs = LossRequirements()
    TorchBackend(make_spec(tiny_model)).train_step(make_batch(**SHAPE), loss)
    assert {(inputs.entropy, inputs.full_kl) for inputs in seen} == {(None, None)}


def test_entropy_and_kl_without_a_reference_or_an_adapter_the_divergence_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="reference"):
        TorchBackend(make_spec(tiny_model)).train_step(make_batch(**SHAPE), PENALTY)
