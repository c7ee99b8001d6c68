"""What must not change loss or gradient: masked tokens, the order of samples, micro-batches. Every preset, float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import KINDS, PROMPT, random_attempts
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_helpers import Step, algorithm_of, take_step
from reference_advantages import Attempt

from roll.config.presets import PRESET_NAMES
from roll.pipelines.learning.losses import build_policy_loss, build_value_loss
from roll.types import TrainingBatch

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 10_000)
every_preset = pytest.mark.parametrize("name", PRESET_NAMES)
few = settings(max_examples=8, deadline=None)
KL: dict[str, Any] = {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}
"""Switched on everywhere, so that their terms are tested with every preset."""


def step_of(name: str, attempts: list[Attempt]) -> Step | None:
    step = take_step(algorithm_of(name, **KL), attempts)
    return step if step.batch.num_loss_tokens else None


def attempts_for(name: str, seed: int, kind: str) -> list[Attempt]:
    return random_attempts(seed, kind, critics=2 if name == "asy_ppo" else 1)


def gradients_by_sample(step: Step, gradient: np.ndarray, order: list[int] | None = None) -> dict[str, np.ndarray]:
    """[n] each."""
    result, start = {}, 0
    for i in order if order is not None else range(len(step.batch.samples)):
        sample = step.batch.samples[i]
        end = start + int(sample.loss_mask.sum())
        result[sample.sample_id] = gradient[start:end]
        start = end
    assert start == len(gradient)
    return result


@every_preset
@few
@given(kind=kinds, seed=seeds, noise=st.integers(0, 100))
def test_algorithm_invariance_masked_tokens_never_move_loss_or_gradient(
    name: str, kind: str, seed: int, noise: int
) -> None:
    """Whatever stands at prompts and at the environment's tokens, in every array that carries something per token."""
    attempts = attempts_for(name, seed, kind)
    step = step_of(name, attempts)
    if step is None:
        return
    rng = np.random.default_rng(noise)

    def garbage(values: list[float], a: Attempt) -> list[float]:
        own = set(a.written)
        return [v if t in own else float(np.float32(100 * rng.normal())) for t, v in enumerate(values)]

    changed = [
        replace(
            a,
            values=[garbage(critic, a) for critic in a.values],
            **{n: garbage(getattr(a, n), a) for n in ("new", "old", "rollout", "ref", "waad", "fai", "entropy")},
        )
        for a in attempts
    ]
    other = take_step(step.algorithm, changed)
    assert other.advantages == step.advantages
    (first, gradient), (second, other_gradient) = step.loss(), other.loss()
    assert first.loss.item() == second.loss.item()
    assert (gradient == other_gradient).all()
    assert all(first.metrics[name] == second.metrics[name] for name in first.metrics)
    assert all(first.maxima[name] == second.maxima[name] for name in first.maxima)


@every_preset
@few
@given(kind=kinds, seed=seeds)
def test_algorithm_invariance_rollouts_without_a_loss_token_change_nothing(name: str, kind: str, seed: int) -> None:
    step = step_of(name, attempts_for(name, seed, kind))
    if step is None:
        return
    sample = step.batch.samples[0]
    silent = replace(sample, sample_id="silent", loss_mask=np.zeros_like(sample.loss_mask))
    batch = replace(step.batch, samples=(silent, *step.batch.samples))
    attempts = {**step.attempts, "silent": step.attempts[sample.sample_id]}
    assert (batch.num_loss_tokens, batch.num_sequences) == (step.batch.num_loss_tokens, step.batch.num_sequences)
    (first, gradient), (second, other) = step.loss(), replace(step, batch=batch, attempts=attempts).loss()
    assert first.loss.item() == second.loss.item()
    assert (gradient == other).all()


@every_preset
@few
@given(kind=kinds, seed=seeds, random=st.randoms(use_true_random=False))
def test_algorithm_invariance_the_order_of_rollouts_and_groups_changes_nothing(
    name: str, kind: str, seed: int, random: Any
) -> None:
    attempts = attempts_for(name, seed, kind)
    step = step_of(name, attempts)
    if step is None:
        return
    groups: dict[int, list[Attempt]] = {}
    for a in attempts:
        groups.setdefault(a.group, []).append(a)
    order = list(groups.values())
    random.shuffle(order)
    for members in order:
        random.shuffle(members)
    other = take_step(step.algorithm, [a for members in order for a in members])
    assert other.advantages.keys() == step.advantages.keys()
    for sample, values in step.advantages.items():  # summed in another order, then rounded to float32
        np.testing.assert_allclose(other.advantages[sample], values, rtol=1e-5, atol=1e-6)


@every_preset
@few
@given(kind=kinds, seed=seeds, random=st.randoms(use_true_random=False))
def test_algorithm_invariance_the_order_of_samples_changes_neither_loss_nor_gradient(
    name: str, kind: str, seed: int, random: Any
) -> None:
    step = step_of(name, attempts_for(name, seed, kind))
    if step is None:
        return
    order = list(range(len(step.batch.samples)))
    random.shuffle(order)
    (first, gradient), (second, other) = step.loss(), step.loss(order=order)
    assert first.loss.item() == pytest.approx(second.loss.item(), rel=1e-9, abs=1e-9)
    expected = gradients_by_sample(step, gradient)
    for sample, values in gradients_by_sample(step, other, order).items():
        np.testing.assert_allclose(values, expected[sample], **TOLERANCE)


@every_preset
@few
@given(kind=kinds, seed=seeds, data=st.data())
def test_algorithm_invariance_any_split_into_micro_batches_adds_up_to_the_whole(
    name: str, kind: str, seed: int, data: Any
) -> None:
    step = step_of(name, attempts_for(name, seed, kind))
    if step is None:
        return
    whole, gradient = step.loss()
    expected = gradients_by_sample(step, gradient)
    number = st.integers(0, 3)
    part_of = [data.draw(number) for _ in step.batch.samples]
    loss, metrics, maxima = 0.0, dict.fromkeys(whole.metrics, 0.0), dict.fromkeys(whole.maxima, 0.0)
    for part in set(part_of):
        own = [i for i, p in enumerate(part_of) if p == part]
        micro = replace(step, batch=replace(step.batch, samples=tuple(step.batch.samples[i] for i in own)))
        outputs, share = micro.loss(totals=step.batch)
        loss += outputs.loss.item()
        for sample, values in gradients_by_sample(micro, share).items():
            np.testing.assert_allclose(values, expected[sample], **TOLERANCE)
        for key, value in outputs.metrics.items():
            metrics[key] += value.item()
            assert not value.requires_grad
        for key, value in outputs.maxima.items():
            maxima[key] = max(maxima[key], value.item())
            assert not value.requires_grad
    assert loss == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-9)
    for key, value in whole.metrics.items():
        assert metrics[key] == pytest.approx(value.item(), rel=1e-9, abs=1e-9), key
    for key, value in whole.maxima.items():
        assert maxima[key] == pytest.approx(value.item(), rel=1e-9, abs=1e-9), key


@few
@given(kind=kinds, seed=seeds, data=st.data())
def test_algorithm_invariance_a_critics_loss_adds_up_over_micro_batches_in_any_order(
    kind: str, seed: int, data: Any
) -> None:
    step = take_step(algorithm_of("ppo"), attempts_for("ppo", seed, kind))
    if not step.batch.num_loss_tokens:
        return
    order = data.draw(st.permutations(range(len(step.batch.samples))))
    cut = data.draw(st.integers(0, len(order)))
    whole, expected = _critic(step, step.batch, list(range(len(order))))
    total, found = 0.0, {}
    for part in (order[:cut], order[cut:]):
        loss, gradients = _critic(step, step.batch, part)
        total += loss
        found |= gradients
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-9)
    for sample, values in expected.items():
        np.testing.assert_allclose(found[sample], values, **TOLERANCE)


def _critic(step: Step, batch: TrainingBatch, order: list[int]) -> tuple[float, dict[str, np.ndarray]]:
    import torch

    def column(array: str) -> torch.Tensor:
        parts = [getattr(batch.samples[i], array)[batch.samples[i].loss_mask] for i in order]
        return torch.tensor(np.concatenate(parts) if parts else np.zeros(0), dtype=torch.float64)

    values = (column("old_values") + 0.3 * torch.sin(column("returns") * 7)).requires_grad_()
    inputs = replace(
        step.inputs(order=order), values=values, old_values=column("old_values"), returns=column("returns"),
        num_tokens=float(batch.num_loss_tokens),
    )  # fmt: skip
    outputs = build_value_loss(step.algorithm)(inputs)
    outputs.loss.backward()
    assert values.grad is not None
    return outputs.loss.item(), gradients_by_sample(step, values.grad.numpy(), order)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_algorithm_invariance_a_loss_travels_to_another_process(name: str) -> None:
    import pickle

    loss = build_policy_loss(algorithm_of(name, **KL))
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_algorithm_invariance_prompts_are_never_in_the_loss() -> None:
    for name in PRESET_NAMES:
        step = step_of(name, attempts_for(name, 1, "multi_turn"))
        assert step is not None
        for sample in step.batch.samples:
            assert not sample.loss_mask[:PROMPT].any()
            assert not sample.advantages[~sample.loss_mask].any()
