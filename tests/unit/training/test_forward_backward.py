"""A training step in its parts: gradients that add up, one update, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_ranks import DOUBLE, LORA, accumulate_by_unit, compute_norms_in_double
from training_helpers import grads_of, make_batch, make_spec, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.errors import UnsupportedError
from roll.training import TorchBackend
from roll.types import BatchCounts, LossInputs, LossOutputs, LossRequirements, OptimParams

NAME = "model.layers.0.self_attn.q_proj.weight"


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def same(first: TorchBackend, second: TorchBackend) -> bool:
    mine, theirs = weights_of(first), weights_of(second)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_forward_backward_and_optim_step_are_a_train_step_to_the_bit(tiny_model: Path) -> None:
    whole, parts = (TorchBackend(make_spec(tiny_model)) for _ in range(2))
    step = whole.train_step(make_batch(), PolicyLoss())
    found = parts.forward_backward(make_batch(), PolicyLoss(), last=True)
    update = parts.optim_step()
    assert same(whole, parts)
    assert (found.loss, found.metrics) == (step.loss, step.metrics)
    assert (update.grad_norm, update.learning_rate, update.stepped) == (step.grad_norm, step.learning_rate, True)
    assert (whole.num_steps, parts.num_steps) == (1, 1)


def test_forward_backward_counts_of_two_batches_add_up() -> None:
    batch = make_batch()
    halves = [dataclasses.replace(batch, samples=batch.samples[part]) for part in (slice(0, 8), slice(8, None))]
    assert halves[0].counts + halves[1].counts == batch.counts
    assert batch.counts == BatchCounts(num_tokens=batch.num_loss_tokens, num_sequences=16, num_units=4)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant_length", "sequence_sum"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_forward_backward_of_single_groups_with_other_counts_scales_to_the_gradient_of_the_batch(
    tiny_model: Path, aggregation: Any, lora: Any
) -> None:
    batch, loss = make_batch(groups=5), PolicyLoss(aggregation=aggregation, entropy_coefficient=0.2)
    unequal = dataclasses.replace(batch, samples=batch.samples[:-3])  # a group of one
    whole, parts = (TorchBackend(make_spec(tiny_model, lora=lora), precision=DOUBLE) for _ in range(2))
    with compute_norms_in_double():
        whole.train_step(unequal, loss)
        accumulate_by_unit(parts, unequal, loss)
    assert relative_error(grads_of(parts), grads_of(whole)) <= 1e-12


def test_forward_backward_of_nothing_to_learn_needs_counts(tiny_model: Path) -> None:
    backend, batch = TorchBackend(make_spec(tiny_model)), make_batch()
    silent = tuple(dataclasses.replace(s, loss_mask=s.loss_mask & False) for s in batch.samples)
    silent_batch = dataclasses.replace(batch, samples=silent)
    with pytest.raises(ValueError, match="at least one loss token"):
        backend.forward_backward(silent_batch, PolicyLoss())
    found = backend.forward_backward(silent_batch, PolicyLoss(), batch.counts)
    assert (found.loss, found.num_loss_tokens) == (0.0, 0)
    backend.forward_backward(batch, PolicyLoss(), batch.counts, last=True)
    backend.optim_step()
    alone = TorchBackend(make_spec(tiny_model))
    alone.train_step(batch, PolicyLoss())
    assert same(backend, alone)


def test_forward_backward_optim_step_needs_a_gradient(tiny_model: Path) -> None:
    backend, batch = TorchBackend(make_spec(tiny_model)), make_batch()
    with pytest.raises(ValueError, match="requires gradients"):
        backend.optim_step()
    backend.train_step(batch, PolicyLoss())
    with pytest.raises(ValueError, match="requires gradients"):
        backend.optim_step()
    backend.forward_backward(batch, PolicyLoss())
    backend.discard_gradients()
    with pytest.raises(ValueError, match="requires gradients"):
        backend.optim_step()
    assert backend.num_steps == 1


@pytest.mark.parametrize("how", ["load", "offload"])
def test_forward_backward_optim_step_has_no_gradient_of_other_weights_or_one_whose_memory_was_handed_over(
    tiny_model: Path, tmp_path: Path, how: str
) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    backend.save(tmp_path / "saved")
    backend.forward_backward(make_batch(), PolicyLoss())
    if how == "load":
        backend.load(tmp_path / "saved")
    else:
        backend.offload(["optimizer"])
        backend.onload(["optimizer"])
    with pytest.raises(ValueError, match="requires gradients"):
        backend.optim_step()


def test_forward_backward_that_fails_forgets_every_gradient(tiny_model: Path) -> None:
    """Between its micro-batches: what was added before cannot be told from what it has added itself."""
    backend, batch = TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=45)), make_batch()
    calls = []

    def failing(inputs: LossInputs) -> LossOutputs:
        calls.append(inputs)
        if len(calls) == 2:
            raise RuntimeError("a loss of the user's own")
        return LossOutputs(loss=inputs.require("logprobs").sum())

    failing.needs = LossRequirements()  # type: ignore[attr-defined]
    backend.forward_backward(make_batch(1), PolicyLoss())
    with pytest.raises(RuntimeError, match="own"):
        backend.forward_backward(batch, failing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires gradients"):
        backend.optim_step()
    backend.train_step(batch, PolicyLoss())
    alone = TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=45))
    alone.train_step(batch, PolicyLoss())
    assert same(backend, alone)


def test_forward_backward_optim_step_params_are_those_of_one_update(tiny_model: Path) -> None:
    """AdamW's first two updates, written out, with settings that differ between them."""
    backend = TorchBackend(make_spec(tiny_model, weight_decay=0.1))
    weight = dict(backend.weights())[NAME].double().clone()
    first = second = torch.zeros_like(weight)
    given = [
        OptimParams(learning_rate=2e-3, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.5, max_grad_norm=0.25),
        OptimParams(),
    ]
    settings = [(2e-3, 0.8, 0.9, 1e-3, 0.5), (1e-3, 0.9, 0.999, 1e-8, 0.1)]
    for step, (params, (rate, beta1, beta2, epsilon, decay)) in enumerate(zip(given, settings, strict=True), start=1):
        backend.forward_backward(make_batch(step), PolicyLoss(), last=True)
        update = backend.optim_step(params)
        grad = backend.masters.get_grad(NAME)
        assert grad is not None and update.grad_norm > 0.25 and update.learning_rate == rate
        if step == 1:
            own = [g.norm() for n in backend.masters.parameters if (g := backend.masters.get_grad(n)) is not None]
            assert float(torch.stack(own).norm()) == pytest.approx(0.25, rel=1e-5)
        first = beta1 * first + (1 - beta1) * grad.double()
        second = beta2 * second + (1 - beta2) * grad.double().square()
        move = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + epsilon)
        weight = weight * (1 - rate * decay) - rate * move
    torch.testing.assert_close(dict(backend.weights())[NAME].double(), weight, rtol=1e-5, atol=1e-7)


def test_forward_backward_is_refused_by_a_reference(tiny_model: Path) -> None:
    backend = TorchBackend(dataclasses.replace(make_spec(tiny_model), role="reference"))
    for call in (
        lambda: backend.forward_backward(make_batch(), PolicyLoss()),
        backend.optim_step,
        backend.discard_gradients,
    ):
        with pytest.raises(UnsupportedError, match="role 'reference'"):
            call()
