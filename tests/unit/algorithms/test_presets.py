"""Every named method, from rollouts to loss and gradient, against the same written from its paper in plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference_loss as paper
from cases import KINDS, MAX_LENGTH, random_attempts
from pipeline_helpers import algorithm_of, take_step
from reference_presets import METHODS

from roll.config.presets import PRESET_NAMES, describe_preset

CASES = [(kind, seed) for kind in KINDS for seed in (0, 1, 2)]


def test_preset_every_preset_has_a_reference() -> None:
    assert set(METHODS) == set(PRESET_NAMES)


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_advantages_loss_and_selection_are_those_of_the_paper(name: str, beta: float) -> None:
    algorithm = algorithm_of(name, kl={"coefficient": beta})
    method = METHODS[name].with_kl(beta)
    compared = 0
    for kind, seed in CASES:
        critics = algorithm.critic.num_critics
        attempts = random_attempts(seed, kind, critics=critics)
        step = take_step(algorithm, attempts)
        trained = method.trained(attempts)
        assert [s.sample_id for s in step.batch.samples] == [a.name for a in trained], (kind, seed)
        if not trained:
            assert step.batch.num_loss_tokens == 0
            continue
        answers = method.answers(attempts, beta if method.kl_in_reward else 0.0)
        for attempt, answer in zip(trained, answers, strict=True):
            found = step.weighted(attempt.name)
            np.testing.assert_allclose(found, answer.advantages, rtol=2e-6, atol=2e-6, err_msg=f"{kind} {seed}")
        rounded = [_rounded(answer) for answer in answers]
        outputs, _ = step.loss()
        expected = paper.total_loss(rounded, method.loss, MAX_LENGTH)
        assert outputs.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6), (kind, seed)
        compared += 1
    assert compared >= 9


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_a_kl_penalty_in_the_reward_comes_before_the_baseline_and_the_scaling(name: str) -> None:
    algorithm = algorithm_of(name, kl={"coefficient": 0.05, "apply_to": "reward", "estimator": "k1"})
    compared = 0
    for kind, seed in CASES[::3]:
        attempts = random_attempts(seed, kind, critics=algorithm.critic.num_critics)
        step = take_step(algorithm, attempts)
        without = take_step(algorithm_of(name), attempts)
        trained = METHODS[name].trained(attempts)
        assert [s.sample_id for s in step.batch.samples] == [a.name for a in trained], (kind, seed)
        for attempt, answer in zip(trained, METHODS[name].answers(attempts, 0.05), strict=True):
            found = step.weighted(attempt.name)
            np.testing.assert_allclose(found, answer.advantages, rtol=2e-6, atol=2e-6, err_msg=f"{kind} {seed}")
            compared += not np.allclose(found, without.weighted(attempt.name), rtol=1e-3)
    assert compared >= 10


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_its_gradient_is_the_finite_difference_of_the_papers_loss(name: str) -> None:
    beta = 0.05
    algorithm = algorithm_of(name, kl={"coefficient": beta})
    method = METHODS[name].with_kl(beta)
    for kind, seed in (("multi_turn", 4), ("ragged", 5)):
        attempts = random_attempts(seed, kind, critics=algorithm.critic.num_critics)
        step = take_step(algorithm, attempts)
        _, found = step.loss()
        expected = paper.gradient(
            method.answers(attempts, beta if method.kl_in_reward else 0.0), method.loss, MAX_LENGTH
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=kind)
        assert np.abs(found).max() > 1e-4


def _rounded(answer: paper.Answer) -> paper.Answer:
    """Advantages travel as float32."""
    return replace(answer, advantages=[float(np.float32(a)) for a in answer.advantages])


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_every_preset_names_its_paper_and_its_formula(name: str) -> None:
    text = describe_preset(name)
    assert "arXiv" in text or "Williams 1992" in text
    assert "=" in text
