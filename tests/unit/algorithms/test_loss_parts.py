"""Every gate, ratio level, correction, aggregation, KL estimator and the critic's loss against plain loops."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference_loss as paper
import torch
from cases import MAX_LENGTH, loss_inputs_of, random_answers

from roll.algorithms import gates
from roll.algorithms.aggregate import compute_aggregation_weights
from roll.algorithms.correction import Correction
from roll.algorithms.kl import KLEstimator, estimate_kl
from roll.algorithms.losses import PolicyLoss, ValueLoss
from roll.algorithms.ratio import compute_log_ratio
from roll.types import LossInputs

SHAPES = [(1,), (1, 1, 1, 1), (5,), (3, 1, 4, 2, 6), (2, 7, 1, 3)]
GATES: dict[str, tuple[gates.Gate, paper.Objective]] = {
    "min_clip": (gates.MinClip(low=0.1, high=0.28), paper.ppo(0.1, 0.28)),
    "min_clip_from_zero": (gates.MinClip(low=1.0, high=0.0), paper.ppo(1.0, 0.0)),
    "dual_clip": (gates.DualClip(low=0.2, high=0.2, bound=1.4), paper.dual_clip(0.2, 0.2, 1.4)),
    "stop_gradient": (gates.StopGradient(lower=0.9, upper=1.1), paper.weighted_log_prob(0.9, 1.1)),
    "stop_gradient_mask": (
        gates.StopGradient(lower=0.9, upper=1.1, mask=True),
        paper.weighted_log_prob(0.9, 1.1, True),
    ),
    "sign_split": (
        gates.SignSplit(positive_weight=1.5, negative_weight=0.5, lower=0.9, upper=1.1),
        paper.by_sign(1.5, 0.5, 0.9, 1.1),
    ),
    "none": (gates.NoGate(), paper.ratio_alone),
    "log_prob": (gates.LogProbGate(), paper.log_prob),
    "squared_penalty": (gates.SquaredPenalty(tau=0.3), paper.squared_penalty(0.3)),
    "soft": (gates.SoftGate(tau_positive=2.0, tau_negative=0.5), paper.soft(2.0, 0.5)),
}
OVER = {"sequence_mean": "answers", "token_mean": "tokens", "constant_length": "longest", "sequence_sum": "sums"}
OFF = {"correction": Correction(upper=None)}
PAPER_OFF = paper.Correction(upper=None)


def both(loss: PolicyLoss, reference: paper.Loss, lengths: tuple[int, ...], seed: int, noise: float = 0.3) -> None:
    """Value and gradient agree."""
    answers = random_answers(seed, lengths, noise)
    inputs = loss_inputs_of(answers)
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(paper.total_loss(answers, reference, MAX_LENGTH), rel=1e-11, abs=1e-12)
    assert inputs.logprobs.grad is not None
    expected = paper.gradient(answers, reference, MAX_LENGTH)
    scale = max(abs(x) for x in expected)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), expected, rtol=1e-5, atol=1e-8 + 1e-8 * scale)


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("name", GATES)
def test_loss_gates(name: str, lengths: tuple[int, ...]) -> None:
    gate, objective = GATES[name]
    both(PolicyLoss(gate=gate, **OFF), paper.Loss(objective=objective, correction=PAPER_OFF), lengths, 1)


@pytest.mark.parametrize("against", ["old", "rollout", "behavior"])
@pytest.mark.parametrize("reduce", ["geometric", "product"])
@pytest.mark.parametrize("level", ["token", "chunk", "sequence", "sequence_token"])
@pytest.mark.parametrize("name", GATES)
def test_loss_ratio_levels_under_every_gate(name: str, level: Any, reduce: Any, against: Any) -> None:
    gate, objective = GATES[name]
    loss = PolicyLoss(gate=gate, ratio_level=level, ratio_reduce=reduce, ratio_against=against, **OFF)
    reference = paper.Loss(objective=objective, ratio=level, reduce=reduce, against=against, correction=PAPER_OFF)
    both(loss, reference, (3, 1, 4, 2), 2, noise=0.1)


@pytest.mark.parametrize("level", ["chunk", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_a_limit_on_tokens_before_the_mean_is_taken(level: Any, seed: int) -> None:
    loss = PolicyLoss(gate=gates.NoGate(), ratio_level=level, ratio_token_limit=0.1, **OFF)
    reference = paper.Loss(objective=paper.ratio_alone, ratio=level, max_token_log_ratio=0.1, correction=PAPER_OFF)
    both(loss, reference, (3, 1, 4, 2), seed)


@pytest.mark.parametrize("corrects", ["both", "mismatch", "staleness"])
@pytest.mark.parametrize("level", ["token", "chunk", "sequence", "geometric"])
@pytest.mark.parametrize(
    "given",
    [
        {"upper": 1.1},
        {"upper": None, "mask_low": 0.8},
        {"upper": None, "mask_high": 1.2},
        {"upper": 1.5, "mask_low": 0.7, "mask_high": 1.3},
        {"upper": 2.0, "veto": 0.6},
    ],
    ids=str,
)
def test_loss_corrections(level: Any, given: dict[str, Any], corrects: Any) -> None:
    named = {"mask_low": "low", "mask_high": "high"}
    reference = paper.Correction(level=level, corrects=corrects, **{named.get(k, k): v for k, v in given.items()})
    correction = Correction(level=level, corrects=corrects, **given)
    for seed in range(4):
        answers = random_answers(seed, (3, 1, 4, 2, 6))
        weights = correction.compute_weights(loss_inputs_of(answers))
        expected = [paper.correction_weight(a, t, reference) for a in answers for t in range(len(a.new))]
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    loss = PolicyLoss(correction=correction)
    both(loss, paper.Loss(objective=paper.ppo(0.2, 0.2), correction=reference), (3, 1, 4, 2), 5)


@pytest.mark.parametrize("seed", range(3))
def test_loss_corrections_for_mismatch_and_for_staleness_multiply_to_the_one_for_both(seed: int) -> None:
    inputs = loss_inputs_of(random_answers(seed, (3, 1, 4, 2, 6)))
    both, mismatch, staleness = (
        Correction(level="sequence", corrects=corrects, upper=None).compute_factor(inputs)
        for corrects in ("both", "mismatch", "staleness")
    )
    torch.testing.assert_close(mismatch * staleness, both, rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("aggregation", OVER)
def test_loss_aggregations(aggregation: Any, lengths: tuple[int, ...]) -> None:
    answers = random_answers(3, lengths)
    found = compute_aggregation_weights(loss_inputs_of(answers), aggregation)
    expected = [paper.token_weight(a, answers, OVER[aggregation], MAX_LENGTH) for a in answers for _ in a.new]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)
    both(
        PolicyLoss(aggregation=aggregation),
        paper.Loss(objective=paper.ppo(0.2, 0.2), over=OVER[aggregation]),
        lengths,
        3,
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute", "full"])
@pytest.mark.parametrize("aggregation", OVER)
def test_loss_kl_in_the_loss(estimator: Any, aggregation: Any) -> None:
    loss = PolicyLoss(kl_coefficient=0.7, kl_estimator=estimator, aggregation=aggregation)
    reference = paper.Loss(objective=paper.ppo(0.2, 0.2), beta=0.7, kl=estimator, over=OVER[aggregation])
    both(loss, reference, (3, 1, 4, 2), 6)


@pytest.mark.parametrize("aggregation", OVER)
def test_loss_entropy_bonus_where_it_is_paid(aggregation: Any) -> None:
    loss = PolicyLoss(entropy_coefficient=0.3, aggregation=aggregation)
    both(loss, paper.Loss(objective=paper.ppo(0.2, 0.2), eta=0.3, over=OVER[aggregation]), (3, 1, 4, 2), 7)
    answers = [replace(a, gets_bonus=[]) for a in random_answers(7, (3, 1, 4, 2))]
    inputs = replace(loss_inputs_of(random_answers(7, (3, 1, 4, 2))), entropy_mask=None)
    reference = paper.Loss(objective=paper.ppo(0.2, 0.2), eta=0.3, over=OVER[aggregation])
    assert loss(inputs).loss.item() == pytest.approx(paper.total_loss(answers, reference, MAX_LENGTH), rel=1e-12)


def test_loss_entropy_and_full_kl_carry_their_own_gradient() -> None:
    inputs = loss_inputs_of(random_answers(8, (3, 1, 4)))
    assert inputs.entropy is not None
    assert inputs.full_kl is not None
    entropy, kl = inputs.entropy.requires_grad_(), inputs.full_kl.requires_grad_()
    loss = PolicyLoss(entropy_coefficient=0.3, kl_coefficient=0.5, kl_estimator="full", aggregation="token_mean")
    loss(inputs).loss.backward()
    assert inputs.entropy_mask is not None
    torch.testing.assert_close(entropy.grad, -0.3 / 8 * inputs.entropy_mask.double())
    torch.testing.assert_close(kl.grad, torch.full((8,), 0.5 / 8, dtype=torch.float64))


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_loss_value_loss(lengths: tuple[int, ...], clip: float | None) -> None:
    rng = np.random.default_rng(9)
    values, old, returns = rng.normal(size=(3, sum(lengths)))
    inputs = value_inputs(lengths, values, old, returns)
    outputs = ValueLoss(clip=clip)(inputs)
    outputs.loss.backward()
    arguments = old.tolist(), returns.tolist(), clip
    assert outputs.loss.item() == pytest.approx(paper.value_loss(values.tolist(), *arguments), rel=1e-12)
    assert inputs.values is not None
    assert inputs.values.grad is not None
    for i in range(len(values)):
        up, down = values.copy(), values.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        slope = (paper.value_loss(up.tolist(), *arguments) - paper.value_loss(down.tolist(), *arguments)) / 2e-6
        assert inputs.values.grad[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def value_inputs(lengths: tuple[int, ...], values: np.ndarray, old: np.ndarray, returns: np.ndarray) -> LossInputs:
    inputs = loss_inputs_of(random_answers(0, lengths))
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (values, old, returns)]
    return replace(inputs, values=tensors[0].requires_grad_(), old_values=tensors[1], returns=tensors[2], expert=None)


def test_loss_a_critic_learns_nothing_from_an_experts_tokens() -> None:
    inputs = value_inputs((2, 3), np.zeros(5), np.zeros(5), np.array([1.0, 2.0, 9.0, 9.0, 9.0]))
    expert = torch.tensor([False, False, True, True, True])
    outputs = ValueLoss()(replace(inputs, expert=expert))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(0.5 * (1.0 + 4.0) / 5)
    assert inputs.values is not None and inputs.values.grad is not None
    assert inputs.values.grad.tolist() == pytest.approx([-1 / 5, -2 / 5, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", GATES)
def test_loss_clipped_tokens_are_those_whose_objective_a_bound_changes(name: str) -> None:
    """Without its bounds, a gate has another objective at exactly these tokens."""
    gate, objective = GATES[name]
    unbounded: dict[str, paper.Objective] = {
        "min_clip": paper.ratio_alone,
        "min_clip_from_zero": paper.ratio_alone,
        "dual_clip": paper.ratio_alone,
        "stop_gradient": lambda r, s, p, a: s * a * p,
        "stop_gradient_mask": lambda r, s, p, a: s * a * p,
        "sign_split": paper.by_sign(1.5, 0.5, 0.0, float("inf")),
    }
    ratios = (0.05, 0.5, 0.95, 1.0, 1.05, 1.5, 5.0)
    for r, a in itertools.product(ratios, (-2.0, -0.5, 0.0, 1.0)):
        changed = objective(r, r, -1.0, a) != unbounded.get(name, objective)(r, r, -1.0, a)
        found = gate.compute_clip_mask(torch.tensor([r], dtype=torch.float64), torch.tensor([a], dtype=torch.float64))
        if a != 0:
            assert found.item() == changed, (r, a)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute", "full"])
def test_loss_policy_metrics_are_means_over_the_tokens_that_the_policy_sampled(estimator: KLEstimator) -> None:
    """A demonstration changes no metric but the loss scale, which is of all tokens."""
    answers = random_answers(1, (3, 2, 4, 5))  # the fourth is an expert's
    hidden = [*answers[:3], replace(answers[3], rollout=[0.0] * 5, old=[-9.0] * 5)]
    loss = PolicyLoss(kl_coefficient=0.1, kl_estimator=estimator)
    metrics, own = (loss(loss_inputs_of(given)).metrics for given in (hidden, answers[:3]))
    assert {"policy/kl_reference", "policy/ratio", "mismatch/kl", "mismatch/truncated"} <= metrics.keys() == own.keys()
    for name in own.keys() - {"policy/loss_scale"}:
        assert metrics[name].item() == pytest.approx(own[name].item(), rel=1e-12), name


def test_loss_policy_metrics_of_demonstrations_alone_are_absent() -> None:
    inputs = loss_inputs_of(random_answers(1, (3, 2, 4, 5))[3:])
    assert inputs.num_own_tokens == 0
    outputs = PolicyLoss(kl_coefficient=0.1)(inputs)
    assert outputs.metrics.keys() == {"policy/loss_scale"} and torch.isfinite(outputs.loss)


def test_loss_critic_metrics_leave_an_experts_tokens_out() -> None:
    returns = np.array([1.0, 2.0, 9.0, 9.0, 9.0])
    inputs = value_inputs((2, 3), np.array([0.0, 1.0, 5.0, 5.0, 5.0]), np.zeros(5), returns)
    expert = torch.tensor([False, False, True, True, True])
    metrics = ValueLoss()(replace(inputs, expert=expert, num_expert_tokens=3.0)).metrics
    by_hand = {"mean": 0.5, "error": 1.0, "clip_fraction": 0.0, "return": 1.5, "return_squared": 2.5}
    assert {name: value.item() for name, value in metrics.items()} == {f"value/{n}": v for n, v in by_hand.items()}


def test_loss_unknown_names_are_refused() -> None:
    inputs = loss_inputs_of(random_answers(1, (3,)))
    with pytest.raises(ValueError, match="median"):
        compute_aggregation_weights(inputs, "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k4"):
        estimate_kl(inputs.logprobs, inputs.old_logprobs, "k4")  # type: ignore[arg-type]


def test_loss_without_chunk_ids_a_sequence_is_one_chunk() -> None:
    inputs = replace(loss_inputs_of(random_answers(1, (3, 2, 4))), chunk_ids=None)
    torch.testing.assert_close(compute_log_ratio(inputs, level="chunk"), compute_log_ratio(inputs, level="sequence"))
    chunk, geometric = (Correction(level=level).compute_factor(inputs) for level in ("chunk", "geometric"))
    torch.testing.assert_close(chunk, geometric)
