"""What one optimiser step does, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import logprobs_of, make_batch, make_spec, reference_logprobs

from roll.algorithms.losses import PolicyLoss
from roll.errors import ModelError, TrainingDivergedError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import LossInputs, LossOutputs, LossRequirements, TrainingBatch


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def nan_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs.sum() * float("nan"))


nan_loss.needs = LossRequirements()


def test_train_step_weights_follow_adamw_with_clipping_written_out(tiny_model: Path) -> None:
    batch = make_batch()
    settings = {"weight_decay": 0.1, "max_grad_norm": 0.5, "beta2": 0.99, "warmup_steps": 2}
    backend = TorchBackend(make_spec(tiny_model, **settings))
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = dict(backend.weights())[name].double().clone()
    first = second = torch.zeros_like(weight)
    for step, rate in enumerate([5e-4, 1e-3, 1e-3], start=1):
        result = backend.train_step(batch, PolicyLoss())
        grad = backend.masters.get_grad(name)
        assert grad is not None
        assert result.grad_norm > 0.5
        assert result.learning_rate == pytest.approx(rate)
        clipped = torch.stack(
            [g.norm() for n in backend.masters.parameters if (g := backend.masters.get_grad(n)) is not None]
        )
        assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-5)
        first = 0.9 * first + 0.1 * grad.double()
        second = 0.99 * second + 0.01 * grad.double().square()
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        weight = weight * (1 - rate * 0.1) - rate * update
    torch.testing.assert_close(dict(backend.weights())[name].double(), weight, rtol=1e-5, atol=1e-7)


def test_train_step_the_last_micro_batch_of_a_step_is_said_to_be(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed adds up over ranks, and steps, at that one."""
    backend = TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=45))
    said: list[bool] = []
    monkeypatch.setattr(backend, "_backward", lambda loss, *, last: (loss.backward(), said.append(last)))
    backend.train_step(make_batch(), PolicyLoss())
    assert len(said) > 2 and said == [False] * (len(said) - 1) + [True]


def test_train_step_norms_are_not_decayed(tiny_model: Path) -> None:
    before = TorchBackend(make_spec(tiny_model)).weights()
    batch = dataclasses.replace(
        make_batch(), samples=tuple(dataclasses.replace(s, advantages=0 * s.advantages) for s in make_batch().samples)
    )
    backend = TorchBackend(make_spec(tiny_model, weight_decay=0.5, learning_rate=0.1))
    backend.train_step(batch, PolicyLoss())
    for (name, old), (_, new) in zip(before, backend.weights(), strict=True):
        torch.testing.assert_close(new, old if old.ndim == 1 else old * 0.95, msg=name)


def test_train_step_logprobs_equal_those_of_the_model_alone_for_every_token(tiny_model: Path) -> None:
    batch = make_batch(8)
    model = load_causal_lm(tiny_model, torch.float32, attention="eager")
    expected = reference_logprobs(model, batch)
    found = logprobs_of(TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=50)), batch)
    for values, reference, sample in zip(found, expected, batch.samples, strict=True):
        assert values.dtype == np.float32
        assert values.shape == sample.token_ids.shape
        assert values[0] == 0
        np.testing.assert_allclose(values, reference.detach().numpy(), atol=1e-5)


def test_train_step_a_step_returns_the_logprobs_of_its_forward_pass_in_the_order_of_the_batch(tiny_model: Path) -> None:
    batch = make_batch(9)
    backend = TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=50))
    before = logprobs_of(backend, batch)
    result = backend.train_step(batch, PolicyLoss())
    for stepped, values, sample in zip(result.logprobs, before, batch.samples, strict=True):
        np.testing.assert_allclose(stepped, np.where(sample.loss_mask, values, 0), atol=1e-5)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(before, logprobs_of(backend, batch), strict=True))


def test_train_step_without_old_logprobs_the_ratio_is_one_and_with_them_it_is_theirs(tiny_model: Path) -> None:
    batch = make_batch(9)
    backend = TorchBackend(make_spec(tiny_model))
    old = logprobs_of(backend, batch)
    assert backend.train_step(batch, PolicyLoss()).metrics["policy/ratio"] == pytest.approx(1.0)
    given = [dataclasses.replace(s, old_logprobs=o) for s, o in zip(batch.samples, old, strict=True)]
    result = backend.train_step(dataclasses.replace(batch, samples=tuple(given)), PolicyLoss())
    new = [np.where(s.loss_mask, n - o, 0) for s, n, o in zip(given, result.logprobs, old, strict=True)]
    mean = sum(np.exp(d)[s.loss_mask].sum() for s, d in zip(given, new, strict=True)) / batch.num_loss_tokens
    assert result.metrics["policy/ratio"] == pytest.approx(mean, rel=1e-5)
    assert abs(mean - 1) > 1e-4


def test_train_step_tokens_outside_the_loss_mask_never_move_the_loss(tiny_model: Path) -> None:
    batch = make_batch(11)
    noisy = []
    for sample in batch.samples:
        junk = np.where(sample.loss_mask, 0, 1e6).astype(np.float32)
        noisy.append(
            dataclasses.replace(
                sample,
                advantages=sample.advantages + junk,
                rollout_logprobs=sample.rollout_logprobs - junk,
            )
        )
    results = [
        TorchBackend(make_spec(tiny_model)).train_step(b, PolicyLoss())
        for b in (batch, dataclasses.replace(batch, samples=tuple(noisy)))
    ]
    assert results[0].loss == results[1].loss
    assert results[0].grad_norm == results[1].grad_norm
    assert results[0].metrics == results[1].metrics


def test_train_step_counts_are_those_of_the_batch(tiny_model: Path) -> None:
    batch = make_batch(12)
    result = TorchBackend(make_spec(tiny_model, share_prefix=False)).train_step(batch, PolicyLoss())
    assert result.num_loss_tokens == sum(int(s.loss_mask.sum()) for s in batch.samples)
    assert result.num_tokens == sum(len(s) - 1 for s in batch.samples)
    assert set(result.timings_s) == {"forward_backward", "optimizer"}
    assert all(seconds > 0 for seconds in result.timings_s.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_step_non_finite_gradients_move_nothing_and_stop_the_run_at_the_limit(
    tiny_model: Path, dtype: str
) -> None:
    batch = make_batch()
    backend = TorchBackend(make_spec(tiny_model, dtype=dtype, max_nonfinite_steps=2, warmup_steps=5))
    backend.train_step(batch, PolicyLoss())
    before = weights_of(backend)
    moments = {n: [m.clone() for m in ms.values()] for n, ms in backend.optimizer.get_moments().items()}
    result = backend.train_step(batch, nan_loss)
    assert not result.stepped
    assert backend.num_steps == 1
    assert all(torch.equal(before[n], t) for n, t in backend.weights())
    for name, found in backend.optimizer.get_moments().items():
        assert all(torch.equal(a, b) for a, b in zip(found.values(), moments[name], strict=True))
    assert backend.train_step(batch, PolicyLoss()).stepped  # the row of failures ends
    assert not backend.train_step(batch, nan_loss).stepped
    with pytest.raises(TrainingDivergedError, match="2 consecutive steps"):
        backend.train_step(batch, nan_loss)


def test_train_step_a_batch_without_loss_tokens_is_refused(tiny_model: Path) -> None:
    batch = make_batch()
    silent = tuple(dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in batch.samples)
    with pytest.raises(ValueError, match="at least one loss token"):
        TorchBackend(make_spec(tiny_model)).train_step(TrainingBatch(samples=silent), PolicyLoss())


def test_train_step_samples_without_loss_tokens_are_left_out_and_get_zeros(tiny_model: Path) -> None:
    batch = make_batch()
    silent = dataclasses.replace(batch.samples[1], loss_mask=np.zeros_like(batch.samples[1].loss_mask))
    mixed = dataclasses.replace(batch, samples=(batch.samples[0], silent))
    only = dataclasses.replace(batch, samples=batch.samples[:1])
    found, expected = (TorchBackend(make_spec(tiny_model)).train_step(b, PolicyLoss()) for b in (mixed, only))
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert not found.logprobs[1].any()


def test_train_step_bfloat16_keeps_float32_masters_that_small_updates_still_move(tiny_model: Path) -> None:
    batch = make_batch()
    backend = TorchBackend(make_spec(tiny_model, dtype="bfloat16", learning_rate=1e-6))
    name = "model.layers.0.mlp.up_proj.weight"
    start = backend.masters.get_full(name).clone()
    assert start.dtype == torch.float32
    assert dict(backend.model.named_parameters())[name].dtype == torch.bfloat16
    for _ in range(3):
        backend.train_step(batch, PolicyLoss())
    moved = (backend.masters.get_full(name) - start).abs()
    assert float(moved.max()) == pytest.approx(3e-6, rel=0.2)
    assert torch.equal(dict(backend.weights())[name], backend.masters.get_full(name).bfloat16())


def test_train_step_bfloat16_gradients_are_added_up_in_float32(tiny_model: Path) -> None:
    batch = make_batch(0, groups=8)
    whole, parts = (
        TorchBackend(make_spec(tiny_model, dtype="bfloat16", max_tokens_per_micro_batch=budget)) for budget in (4096, 1)
    )
    results = [backend.train_step(batch, PolicyLoss()) for backend in (whole, parts)]
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=0.02)
    grad = parts.masters.get_grad("model.layers.0.mlp.up_proj.weight")
    assert grad is not None
    assert grad.dtype == torch.float32
    assert not torch.equal(grad, grad.bfloat16().float())  # more digits than bfloat16 has


def test_train_step_two_equal_trainers_stay_equal_bit_for_bit(tiny_model: Path) -> None:
    results = []
    for _ in range(2):
        backend = TorchBackend(make_spec(tiny_model, dtype="bfloat16"))
        steps = [backend.train_step(make_batch(seed), PolicyLoss()) for seed in range(3)]
        results.append(([(s.loss, s.grad_norm) for s in steps], weights_of(backend)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][n], results[1][1][n]) for n in results[0][1])


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("token", [-1, 260, 10**6])
def test_train_step_a_token_that_the_model_does_not_have_is_named(tiny_model: Path, place: int, token: int) -> None:
    backend, batch = TorchBackend(make_spec(tiny_model)), make_batch()
    tokens = batch.samples[-1].token_ids.copy()
    tokens[place] = token
    samples = (*batch.samples[:-1], dataclasses.replace(batch.samples[-1], token_ids=tokens))
    wrong = dataclasses.replace(batch, samples=samples)
    said = f"sample '3.3' has token {token}, but '.*' has 260 embeddings: the tokenizer"
    for go in (lambda: backend.train_step(wrong, PolicyLoss()), lambda: backend.forward(wrong, ["logprobs"])):
        with pytest.raises(ModelError, match=said):
            go()


def test_train_step_the_time_of_an_update_ends_when_the_device_has_made_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device goes on computing after it was asked; the clock of this test stands still but for that."""
    clock, backend = [0.0], TorchBackend(make_spec(tiny_model))

    def wait(device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        clock[0] += 5.0

    monkeypatch.setattr("roll.training.rank.time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    assert backend.train_step(make_batch(), PolicyLoss()).timings_s == {"forward_backward": 0.0, "optimizer": 0.0}
    backend.device = torch.device("cuda", 0)
    assert backend.train_step(make_batch(), PolicyLoss()).timings_s == {"forward_backward": 0.0, "optimizer": 5.0}
