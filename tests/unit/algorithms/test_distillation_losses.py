"""Losses of distillation and advantages from a teacher against plain loops over floats; extremes stay finite."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pair_helpers import inputs_of, random_pairs

from roll.algorithms.losses import DistillationLoss, LikelihoodLoss, SummedLoss, TopKDistillationLoss
from roll.algorithms.teacher_advantages import compute_teacher_advantages
from roll.types import Divergence, LossInputs, LossRequirements


def with_tops(seed: int, k: int = 3, vocab: int = 6) -> LossInputs:
    """The policy's log-probs carry a gradient."""
    inputs, rng = inputs_of(random_pairs(seed)), np.random.default_rng(seed)
    size = len(inputs.sequence_ids)
    policy, teacher = (torch.log_softmax(torch.tensor(rng.normal(size=(size, vocab))), dim=1) for _ in range(2))
    top, ids = teacher.topk(k, dim=1)
    return replace(
        inputs,
        top_logprobs=policy.gather(1, ids).requires_grad_(),
        teacher_top_logprobs=top,
        divergence=torch.tensor(np.abs(rng.normal(size=size)), requires_grad=True),
    )


def top_kl(policy: list[float], teacher: list[float]) -> float:
    p, q = [math.exp(x) for x in policy], [math.exp(x) for x in teacher]
    p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
    return sum(y * math.log(y / x) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_distillation_loss_the_likeliest_tokens(aggregation: str) -> None:
    inputs = with_tops(1)
    loss = TopKDistillationLoss(aggregation=aggregation)  # type: ignore[arg-type]
    policy, teacher = inputs.top_logprobs.tolist(), inputs.teacher_top_logprobs.tolist()
    lengths = inputs.sequence_lengths[inputs.sequence_ids].tolist()
    share = [1 / len(policy) if aggregation == "token_mean" else 1 / (n * inputs.num_sequences) for n in lengths]

    def total(policy: list[list[float]]) -> float:
        return sum(w * top_kl(p, q) for w, p, q in zip(share, policy, teacher, strict=True))

    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(total(policy), rel=1e-11)
    for n in range(0, len(policy), 3):
        for j in range(3):
            moved = [[row.copy() for row in policy] for _ in range(2)]
            moved[0][n][j] += 1e-6
            moved[1][n][j] -= 1e-6
            slope = (total(moved[0]) - total(moved[1])) / 2e-6
            assert inputs.top_logprobs.grad[n, j].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_distillation_loss_the_bucket_never_exceeds_the_whole_and_is_the_whole_over_all_tokens() -> None:
    losses = [TopKDistillationLoss()(with_tops(2, k)).loss.item() for k in (1, 3, 5)]
    assert losses == sorted(losses)
    inputs = with_tops(2, 5)  # five of six: the bucket is the sixth
    policy, teacher = (x.exp() for x in (inputs.top_logprobs, inputs.teacher_top_logprobs))
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], dim=1) for x in (policy, teacher))
    assert losses[-1] == pytest.approx((q * (q / p).log()).sum(1).mean().item(), rel=1e-9)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_distillation_loss_a_divergence_is_averaged(aggregation: str) -> None:
    inputs = with_tops(3)
    loss = DistillationLoss(divergence=Divergence(kind="jsd", beta=0.3), aggregation=aggregation)  # type: ignore[arg-type]
    assert loss.needs == LossRequirements(divergence=Divergence(kind="jsd", beta=0.3))
    values = inputs.divergence.tolist()
    by_sequence = [[v for v, s in zip(values, inputs.sequence_ids.tolist(), strict=True) if s == i] for i in range(10)]
    means = [sum(own) / len(own) for own in by_sequence]
    expected = sum(values) / len(values) if aggregation == "token_mean" else sum(means) / 10
    outputs = loss(inputs)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-12)
    assert outputs.metrics["distill/divergence"].item() == pytest.approx(sum(values) / len(values), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distillation_loss_extremes_stay_finite(dtype: torch.dtype) -> None:
    inputs = with_tops(4)
    far = torch.tensor([[0.0, -1e4, -1e4], [-1e4, -1e4, -1e4], [-1e-9, -30.0, -30.0]], dtype=dtype)
    for policy in far:
        for teacher in far:
            own = policy.expand(len(inputs.sequence_ids), 3).clone().requires_grad_()
            given = replace(inputs, top_logprobs=own, teacher_top_logprobs=teacher.expand_as(own))
            loss = TopKDistillationLoss()(given).loss
            loss.backward()
            assert torch.isfinite(loss)
            assert torch.isfinite(own.grad).all()


@pytest.mark.parametrize(("policy", "is_drawn_back"), [(-1e-6, True), (-2e-7, True), (-1e-7, False), (0.0, False)])
def test_distillation_loss_one_kept_token_saturates_in_float32_where_the_docstring_says(
    policy: float, is_drawn_back: bool
) -> None:
    """The teacher has 0.9. The gradient in log p is -q + q' p / (1 - p), without the latter where 1 - p < 1.2e-7."""
    own = torch.tensor([[policy]], requires_grad=True)
    teacher = torch.tensor([[math.log(0.9)]])
    inputs = replace(inputs_of(random_pairs(4)), top_logprobs=own, teacher_top_logprobs=teacher)
    one = replace(
        inputs,
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        sequence_lengths=torch.ones(1),
        num_tokens=1.0,
        logprobs=torch.zeros(1),
    )
    TopKDistillationLoss()(one).loss.backward()
    assert own.grad is not None
    expected = -0.9 + (0.1 / -math.expm1(policy) if is_drawn_back else 0.0)
    assert own.grad.item() == pytest.approx(expected, rel=1e-4)


def test_distillation_loss_losses_are_summed_with_their_weights_and_needs() -> None:
    inputs = with_tops(5)
    parts = DistillationLoss(), TopKDistillationLoss(), LikelihoodLoss()
    both = SummedLoss(parts=tuple(zip((2.0, 0.5, -1.0), parts, strict=True)))
    assert both.needs == LossRequirements(divergence=Divergence(), top_logprobs=True)
    found = [part(inputs) for part in parts]
    outputs = both(inputs)
    assert outputs.loss.item() == pytest.approx(
        2 * found[0].loss.item() + 0.5 * found[1].loss.item() - found[2].loss.item()
    )
    assert outputs.metrics["distill/divergence"] == found[0].metrics["distill/divergence"]  # the first's
    assert outputs.metrics["sft/nll"] == found[2].metrics["sft/nll"]


def test_distillation_loss_a_teachers_advantages() -> None:
    logprobs, teacher = (np.array(x, np.float32) for x in ([0.0, -1.0, -2.0, -3.0], [0.0, -1.5, -0.5, -9.0]))
    mask = np.array([False, True, True, True])
    np.testing.assert_allclose(compute_teacher_advantages(logprobs, teacher, mask), [0, -0.5, 1.5, -6])
    cut = compute_teacher_advantages(logprobs, teacher + 5, mask, coefficient=2.0, limit=4.0)
    np.testing.assert_allclose(cut, [0, 4, 4, -2])
    assert cut.dtype == np.float32
    with pytest.raises(ValueError, match="must have the same shape"):
        compute_teacher_advantages(logprobs[1:], teacher, mask)


@pytest.mark.parametrize(
    ("coefficient", "expected"), [(2.0, [1.0, -1.0, 0.6]), (0.5, [0.25, -1.0, 0.15]), (0.1, [0.05, -0.3, 0.03])]
)
def test_distillation_loss_a_teachers_advantages_are_cut_after_the_coefficient(
    coefficient: float, expected: list[float]
) -> None:
    """Log-ratios are 0.5, -3 and 0.3, and the limit 1 is of what is added to other advantages."""
    logprobs, teacher = np.array([-1.0, -1.0, -1.0], np.float32), np.array([-0.5, -4.0, -0.7], np.float32)
    found = compute_teacher_advantages(logprobs, teacher, np.ones(3, np.bool_), coefficient=coefficient, limit=1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
