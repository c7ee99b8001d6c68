"""Methods that must agree where their differences vanish."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import loss_inputs_of, random_answers, random_attempts
from pipeline_helpers import Step, algorithm_of, take_step
from reference_advantages import Attempt

from roll.algorithms import gates
from roll.algorithms.correction import Correction
from roll.algorithms.gates import Gate
from roll.algorithms.losses import PolicyLoss

LENGTHS = (3, 1, 4, 2, 6)
SAME_GRADIENT_AT_ONE: dict[str, Gate] = {
    "ppo": gates.MinClip(),
    "dual clip": gates.DualClip(),
    "tis": gates.StopGradient(lower=0.0, upper=1.0),
    "cispo": gates.StopGradient(lower=0.8, upper=1.2, mask=True),
    "topr": gates.SignSplit(),
    "none": gates.NoGate(),
    "reinforce": gates.LogProbGate(),
    "kimi 1.5": gates.SquaredPenalty(tau=0.5),
    "sapo": gates.SoftGate(tau_positive=1.0, tau_negative=1.05),
}


def gradient(loss: PolicyLoss, *, on_policy: bool = False, constant: bool = False, seed: int = 0) -> torch.Tensor:
    answers = [replace(a, expert=False) for a in random_answers(seed, LENGTHS)]
    if constant:
        answers = [replace(a, advantages=[a.advantages[0]] * len(a.new)) for a in answers]
    if on_policy:
        answers = [replace(a, old=a.new) for a in answers]
    inputs = loss_inputs_of(answers)
    loss(inputs).loss.backward()
    assert inputs.logprobs.grad is not None
    return inputs.logprobs.grad


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant_length", "sequence_sum"])
@pytest.mark.parametrize("name", SAME_GRADIENT_AT_ONE)
def test_algorithm_identity_at_ratio_one_every_gate_has_the_gradient_of_reinforce(name: str, aggregation: Any) -> None:
    expected = gradient(PolicyLoss(gate=gates.LogProbGate(), aggregation=aggregation), on_policy=True)
    found = gradient(PolicyLoss(gate=SAME_GRADIENT_AT_ONE[name], aggregation=aggregation), on_policy=True)
    close(found, expected)
    assert found.abs().max() > 0


@pytest.mark.parametrize("name", SAME_GRADIENT_AT_ONE)
def test_algorithm_identity_off_policy_they_differ(name: str) -> None:
    """So that the test above can fail."""
    if name == "reinforce":
        return
    reinforce, found = (
        gradient(PolicyLoss(gate=gates.LogProbGate())),
        gradient(PolicyLoss(gate=SAME_GRADIENT_AT_ONE[name])),
    )
    assert (found - reinforce).abs().max() > 1e-3


@pytest.mark.parametrize("noise", [0.3, 60.0])
@pytest.mark.parametrize("low", [0.0003, 0.2])
def test_algorithm_identity_gspo_is_its_token_form_while_an_answer_has_one_advantage(low: float, noise: float) -> None:
    gate = gates.MinClip(low=low, high=low)
    for seed in range(5):
        results = []
        for level in ("sequence", "sequence_token"):
            answers = [
                replace(a, advantages=[a.advantages[0]] * len(a.new)) for a in random_answers(seed, LENGTHS, noise)
            ]
            inputs = loss_inputs_of(answers)
            loss = PolicyLoss(gate=gate, ratio_level=level, correction=Correction(level="geometric"))  # type: ignore[arg-type]
            outputs = loss(inputs)
            outputs.loss.backward()
            results.append((outputs.loss.item(), inputs.logprobs.grad))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
        close(results[0][1], results[1][1])


@pytest.mark.parametrize("seed", range(4))
def test_algorithm_identity_so_are_the_two_presets(seed: int) -> None:
    attempts = random_attempts(seed, "ragged")
    same_step(take_step(algorithm_of("gspo"), attempts), take_step(algorithm_of("gspo_token"), attempts))


def test_algorithm_identity_gspo_and_its_token_form_differ_with_advantages_per_token() -> None:
    one, other = (gradient(PolicyLoss(ratio_level=level)) for level in ("sequence", "sequence_token"))  # type: ignore[arg-type]
    assert (one - other).abs().max() > 1e-3


def one_turn(attempts: list[Attempt]) -> list[Attempt]:
    return [replace(a, turns=[replace(a.turns[0], end=a.length)], length=a.length) for a in attempts]


def same_step(first: Step, second: Step, *, gradients: bool = True) -> None:
    assert first.advantages.keys() == second.advantages.keys()
    assert any(any(values) for values in first.advantages.values())
    for name, values in first.advantages.items():
        np.testing.assert_allclose(values, second.advantages[name], rtol=1e-6, atol=1e-6)
    if gradients:
        np.testing.assert_allclose(first.loss()[1], second.loss()[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_algorithm_identity_ipa_with_one_chunk_is_geometric_trajectory_topr(seed: int) -> None:
    """With TOPR's advantages made IPA's (its discount has no chunk to act on), the answer's ratio, and its mask."""
    attempts = random_attempts(seed, "ragged")
    topr = algorithm_of(
        "topr",
        advantage={"std": "none"},
        ratio={"level": "sequence"},
        correction={"level": "geometric", "upper": None, "mask_high": 1.2},
        aggregation="token_mean",
    )
    same_step(take_step(algorithm_of("ipa"), attempts), take_step(topr, attempts))


@pytest.mark.parametrize("seed", range(4))
def test_algorithm_identity_gigpo_with_states_that_never_recur_is_grpo(seed: int) -> None:
    attempts = random_attempts(seed, "multi_turn")
    unique = [replace(a, turns=[replace(t, state=f"{a.name} {k}") for k, t in enumerate(a.turns)]) for a in attempts]
    grpo = take_step(algorithm_of("grpo", filters={"skip_zero_variance": False}), attempts)
    same_step(take_step(algorithm_of("gi_gpo"), unique), grpo)
    recurring = take_step(algorithm_of("gi_gpo"), attempts)
    assert any(not np.allclose(v, grpo.advantages[n]) for n, v in recurring.advantages.items())


@pytest.mark.parametrize("seed", range(4))
def test_algorithm_identity_rebn_on_one_turn_episodes_is_batch_whitening(seed: int) -> None:
    attempts = random_attempts(seed, "ragged")
    rewards = np.array([a.reward for a in attempts])
    expected = (rewards - rewards.mean()) / np.sqrt(rewards.var() + 1e-8)
    step = take_step(algorithm_of("rebn"), attempts)
    for a, advantage in zip(attempts, expected, strict=True):
        np.testing.assert_allclose(step.advantages[a.name], np.full(len(a.written), advantage), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_algorithm_identity_lite_ppo_with_one_group_has_the_advantages_of_grpo(seed: int) -> None:
    attempts = [a for a in random_attempts(seed, "ragged") if a.group == 0]
    if len({a.reward for a in attempts}) == 1:
        attempts[0] = replace(attempts[0], reward=attempts[0].reward + 1)
    same_step(take_step(algorithm_of("lite_ppo"), attempts), take_step(algorithm_of("grpo"), attempts), gradients=False)


@pytest.mark.parametrize("seed", range(4))
def test_algorithm_identity_ppo_with_lambda_one_and_a_critic_that_says_zero_is_reinforce(seed: int) -> None:
    attempts = [replace(a, values=[[0.0] * a.length]) for a in random_attempts(seed, "multi_turn", critics=1)]
    # one reward for the whole, as REINFORCE has it
    attempts = [replace(a, turns=[replace(t, reward=0.0) for t in a.turns]) for a in attempts]
    common: dict[str, Any] = {"gate": {"type": "log_prob"}, "aggregation": "sequence_sum"}
    ppo = algorithm_of("ppo", advantage={"whiten": "none", "gae_lambda": 1.0}, **common)
    same_step(take_step(ppo, attempts), take_step(algorithm_of("reinforce", advantage={"mean": "none"}), attempts))


@pytest.mark.parametrize("seed", range(4))
def test_algorithm_identity_rloo_is_grpos_centred_reward_times_g_over_g_minus_one(seed: int) -> None:
    attempts = random_attempts(seed, "ragged")
    rloo, centred = (take_step(algorithm_of(name), attempts) for name in ("rloo", "kimi15"))
    sizes = {a.name: sum(b.group == a.group for b in attempts) for a in attempts}
    for name, values in rloo.advantages.items():
        factor = sizes[name] / (sizes[name] - 1)
        np.testing.assert_allclose(values, factor * np.array(centred.advantages[name]), rtol=1e-5, atol=1e-6)


def test_algorithm_identity_decoupled_ppo_with_a_fresh_engine_is_grpo() -> None:
    attempts = [replace(a, rollout=a.old) for a in random_attempts(0, "ragged")]
    same_step(take_step(algorithm_of("decoupled_ppo"), attempts), take_step(algorithm_of("grpo"), attempts))


def test_algorithm_identity_the_correction_makes_a_clip_around_the_old_policy_one_around_the_engines() -> None:
    """Unclipped, (old/rollout) x (pi/old) is pi/rollout: the ratio against the engine needs no correction."""
    exact = Correction(upper=1e9)
    corrected = gradient(PolicyLoss(gate=gates.NoGate(), correction=exact))
    direct = gradient(PolicyLoss(gate=gates.NoGate(), ratio_against="rollout", correction=Correction(upper=None)))
    close(corrected, direct)
