"""Finite in, finite out: every preset, and every gate at every level, whatever the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import MAX_LENGTH, loss_inputs_of, random_answers, random_attempts, to_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_helpers import algorithm_of, take_step
from reference_advantages import Attempt
from test_loss_parts import GATES

from roll.algorithms.correction import Correction
from roll.algorithms.losses import PolicyLoss, ValueLoss
from roll.algorithms.selection import select_training_rollouts
from roll.config.presets import PRESET_NAMES
from roll.types import Group, LossInputs, RolloutStatus

KL: dict[str, Any] = {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}
HUGE = (0.0, 1.0, -1e300, 1e300, 1.7e308, 5e-324, 1e9, 1e-9)


def extreme(attempts: list[Attempt], seed: int, limit: float) -> list[Attempt]:
    """Log-probs that differ by up to ± `limit`, rewards and values of any size."""
    rng = np.random.default_rng(seed)

    def far(length: int) -> list[float]:
        return (-limit * rng.integers(0, 2, size=length) - 1e-3).tolist()

    return [
        replace(
            a,
            reward=float(rng.choice(HUGE)),
            greedy=1e300,
            turns=[replace(t, reward=float(rng.choice(HUGE)) / 1e9) for t in a.turns],
            new=far(a.length),
            old=far(a.length),
            rollout=far(a.length),
            ref=far(a.length),
            values=[rng.choice([0.0, 3e38, -3e38], size=a.length).tolist() for _ in a.values],
        )
        for a in attempts
    ]


@pytest.mark.parametrize("name", PRESET_NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), limit=st.sampled_from([0.0, 19.9, 20.0, 100.0, 1e4]))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_algorithm_finite_every_preset_is_finite_for_any_finite_input(name: str, seed: int, limit: float) -> None:
    attempts = extreme(random_attempts(seed, "multi_turn"), seed, limit)
    step = take_step(algorithm_of(name, **KL), attempts)
    for sample in step.batch.samples:
        assert np.isfinite(sample.advantages).all()
        assert sample.returns is None or np.isfinite(sample.returns).all()
    if step.batch.num_loss_tokens:
        outputs, gradient = step.loss()
        assert np.isfinite(outputs.loss.item())
        assert np.isfinite(gradient).all()
        assert all(np.isfinite(value.item()) for value in (*outputs.metrics.values(), *outputs.maxima.values()))


@pytest.mark.parametrize("reduce", ["geometric", "product"])
@pytest.mark.parametrize("level", ["token", "chunk", "sequence", "sequence_token"])
@pytest.mark.parametrize("name", GATES)
def test_algorithm_finite_log_ratios_of_a_hundred_are_finite_in_float32(name: str, level: Any, reduce: Any) -> None:
    for distance in (100.0, -100.0):
        answers = [
            replace(a, old=[x + distance for x in a.new], rollout=[x - distance for x in a.new], ref=a.old)
            for a in random_answers(0, (3, 1, 4, 2))
        ]
        inputs = as_float32(loss_inputs_of(answers))
        for correction in ("token", "chunk", "sequence", "geometric"):
            loss = PolicyLoss(
                gate=GATES[name][0],
                ratio_level=level,
                ratio_reduce=reduce,
                kl_coefficient=0.1,
                correction=Correction(level=correction, veto=0.1),  # type: ignore[arg-type]
            )
            outputs = loss(inputs)
            (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
            assert torch.isfinite(outputs.loss)
            assert torch.isfinite(gradient).all()
            assert all(torch.isfinite(value) for value in (*outputs.metrics.values(), *outputs.maxima.values()))


def as_float32(inputs: LossInputs) -> LossInputs:
    names = ("old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs", "sequence_lengths")
    floats = {name: getattr(inputs, name).float() for name in names}
    return replace(inputs, logprobs=inputs.logprobs.detach().float().requires_grad_(), **floats)


def test_algorithm_finite_a_micro_batch_without_tokens_has_loss_zero() -> None:
    inputs = replace(loss_inputs_of([]), num_tokens=5.0, num_sequences=2.0, entropy=None, full_kl=None)
    for level in ("token", "chunk", "sequence"):
        for correction in ("token", "chunk", "sequence", "geometric"):
            loss = PolicyLoss(ratio_level=level, correction=Correction(level=correction, veto=0.5))  # type: ignore[arg-type]
            outputs = loss(inputs)
            assert outputs.loss.item() == 0.0
            assert all(torch.isfinite(value) for value in (*outputs.metrics.values(), *outputs.maxima.values()))
    values = torch.zeros(0, dtype=torch.float64)
    assert ValueLoss(clip=0.1)(replace(inputs, values=values, old_values=values, returns=values)).loss.item() == 0.0


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_algorithm_finite_steps_without_a_rollout_are_empty(name: str) -> None:
    algorithm = algorithm_of(name)
    groups = to_groups(random_attempts(0, "ragged"))
    nothing = [replace(g, rollouts=()) for g in groups]
    failed = [
        replace(g, rollouts=tuple(replace(r, status=RolloutStatus.INFRA_ERROR, reward=None) for r in g.rollouts))
        for g in groups
    ]
    for empty in ([], nothing, failed, [*nothing[:1], *failed[1:]]):
        selection = select_training_rollouts(empty, algorithm, max_new_tokens=MAX_LENGTH, greedy=_greedy(groups))
        assert selection.rollouts == ()
        assert selection.outcomes.shape == (0,)
        assert all(outcome == "failed" for outcome, _ in selection.draw_outcomes.values())
    step = take_step(algorithm, [replace(a, turns=[replace(t, end=t.start) for t in a.turns]) for a in masked()])
    assert step.batch.samples == ()


def masked() -> list[Attempt]:
    return random_attempts(0, "multi_turn")


def _greedy(groups: list[Group]) -> list[Group]:
    return [replace(g, rollouts=g.rollouts[:1]) for g in groups]
