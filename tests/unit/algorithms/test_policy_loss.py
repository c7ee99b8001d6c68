"""The policy loss, its gradient and metrics: numbers by hand, and invariants of every setting."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.aggregate import token_weights
from roll.algorithms.inputs import LossInputs
from roll.algorithms.kl import kl_per_token
from roll.algorithms.losses import PolicyLoss

AGGREGATIONS = ("sequence_mean", "token_mean", "constant_length")


def make_inputs(
    lengths: list[int], *, seed: int = 0, totals: tuple[float, float] | None = None, **given: Any
) -> LossInputs:
    """Sequences of these lengths with random values; `totals` are the global counts of tokens and sequences."""
    n = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(5, n, generator=generator, dtype=torch.float64)
    values: dict[str, Any] = {
        "logprobs": noise[0] - 2,
        "old_logprobs": noise[0] - 2 + 0.3 * noise[1],
        "rollout_logprobs": noise[0] - 2 + 0.1 * noise[2],
        "advantages": noise[3],
        "ref_logprobs": noise[0] - 2 + 0.3 * noise[4],
    }
    values |= {name: torch.tensor(v, dtype=torch.float64) for name, v in given.items()}
    tokens, sequences = totals or (float(n), float(len(lengths)))
    return LossInputs(
        logprobs=values.pop("logprobs").requires_grad_(),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        sequence_lengths=torch.tensor(lengths, dtype=torch.float64),
        num_tokens=tokens,
        num_sequences=sequences,
        max_length=8.0,
        **values,
    )


def test_loss_gradient_and_clip_fraction_by_hand() -> None:
    inputs = make_inputs(
        [1, 2],
        logprobs=[math.log(0.5), math.log(0.6), math.log(0.2)],
        old_logprobs=[math.log(0.4), math.log(0.4), math.log(0.4)],  # ratios 1.25, 1.5, 0.5
        advantages=[1.0, -1.0, -2.0],
    )
    outputs = PolicyLoss(clip_low=0.2, clip_high=0.28)(inputs)
    outputs.loss.backward()
    # token 1: 1.25 < 1.28, unclipped: 1.25. Token 2: min(-1.5, -1.28) = -1.5, unclipped. Token 3: min(-1, -1.6) = -1.6.
    assert outputs.loss.item() == pytest.approx(-(1.25 / 1 + (-1.5 - 1.6) / 2) / 2)
    # d(r A)/dlogprob = r A where not clipped, else 0; weights 1/2, 1/4, 1/4
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.25 / 2, 1.5 / 4, 0.0])
    metrics = {name: value.item() for name, value in outputs.metrics.items()}
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/ratio"] == pytest.approx((1.25 + 1.5 + 0.5) / 3)
    assert metrics["max/policy/ratio"] == pytest.approx(1.5)
    assert metrics["policy/entropy_estimate"] == pytest.approx(-math.log(0.5 * 0.6 * 0.2) / 3)
    assert metrics["policy/loss_scale"] == pytest.approx((1.25 + (1.5 + 1.0) / 2) / 2)
    expected_kl = sum(r - 1 - math.log(r) for r in (1.25, 1.5, 0.5)) / 3
    assert metrics["policy/approximate_kl"] == pytest.approx(expected_kl)


def test_difference_between_rollout_and_old_logprobs() -> None:
    inputs = make_inputs([2, 1], old_logprobs=[-1.0, -2.0, -3.0], rollout_logprobs=[-1.5, -2.0, -2.0])
    metrics = PolicyLoss()(inputs).metrics
    assert metrics["policy/rollout_logprob_difference"].item() == pytest.approx(0.5)
    assert metrics["max/policy/rollout_logprob_difference"].item() == pytest.approx(1.0)


def test_weights_of_the_three_aggregations_by_hand() -> None:
    inputs = make_inputs([1, 3], totals=(10.0, 4.0))
    assert token_weights(inputs, "sequence_mean").tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12])
    assert token_weights(inputs, "token_mean").tolist() == pytest.approx([1 / 10] * 4)
    assert token_weights(inputs, "constant_length").tolist() == pytest.approx([1 / 32] * 4)
    with pytest.raises(ValueError, match="median"):
        token_weights(inputs, "median")  # type: ignore[arg-type]


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    inputs = make_inputs([2, 3])
    on_policy = make_inputs([2, 3], old_logprobs=inputs.logprobs.tolist(), logprobs=inputs.logprobs.tolist())
    PolicyLoss(aggregation="token_mean")(on_policy).loss.backward()
    assert on_policy.logprobs.grad is not None
    torch.testing.assert_close(on_policy.logprobs.grad, -on_policy.advantages / 5)


def test_kl_estimators_by_hand() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.1)], dtype=torch.float64)
    ref = torch.tensor([math.log(0.25), math.log(0.2)], dtype=torch.float64)
    k1, k2, k3 = (kl_per_token(logprobs, ref, name).tolist() for name in ("k1", "k2", "k3"))
    assert k1 == pytest.approx([math.log(2), -math.log(2)])
    assert k2 == pytest.approx([math.log(2) ** 2 / 2] * 2)
    assert k3 == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2)])
    with pytest.raises(ValueError, match="k4"):
        kl_per_token(logprobs, ref, "k4")  # type: ignore[arg-type]


def test_k1_and_k3_are_unbiased_and_the_gradient_of_k2_is_that_of_the_true_divergence() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 0.1], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    truth = (logp.exp() * (logp - ref)).sum()
    probabilities = logp.exp().detach()
    for estimator in ("k1", "k3"):
        assert (probabilities * kl_per_token(logp, ref, estimator)).sum().item() == pytest.approx(truth.item())
    (expected,) = torch.autograd.grad(truth, logits, retain_graph=True)
    (found,) = torch.autograd.grad((probabilities * kl_per_token(logp, ref, "k2")).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_the_penalty_is_added_with_its_coefficient_and_needs_a_reference() -> None:
    inputs = make_inputs([2, 1], totals=(6.0, 2.0))
    plain = PolicyLoss()(inputs)
    penalised = PolicyLoss(kl_coefficient=0.5, kl_estimator="k2")(inputs)
    kl = 0.5 * (inputs.logprobs - inputs.ref_logprobs).square()  # type: ignore[operator]
    expected = 0.5 * (kl[:2].mean() + kl[2]) / 2
    assert (penalised.loss - plain.loss).item() == pytest.approx(expected.item())
    assert penalised.metrics["policy/kl_reference"].item() == pytest.approx(kl.sum().item() / 6)
    assert "policy/kl_reference" not in plain.metrics
    with pytest.raises(ValueError, match="ref_logprobs"):
        PolicyLoss(kl_coefficient=0.5)(_without_reference(inputs))


def _without_reference(inputs: LossInputs) -> LossInputs:
    import dataclasses

    return dataclasses.replace(inputs, ref_logprobs=None)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(["k1", "k2", "k3"]),
    st.integers(0, 1000),
    st.data(),
)
def test_shares_of_any_split_add_up_to_the_loss_gradient_and_metrics_of_the_whole(
    lengths: list[int], aggregation: Any, estimator: Any, seed: int, data: st.DataObject
) -> None:
    loss = PolicyLoss(aggregation=aggregation, kl_coefficient=0.2, kl_estimator=estimator)
    whole = make_inputs(lengths, seed=seed)
    outputs = loss(whole)
    outputs.loss.backward()
    cut = data.draw(st.integers(0, len(lengths)))
    totals = (whole.num_tokens, whole.num_sequences)
    total, grads, metrics = 0.0, [], []
    edges = [0, *itertools.accumulate(lengths)]
    for first, last in ((0, cut), (cut, len(lengths))):
        if first == last:
            continue
        tokens = slice(edges[first], edges[last])
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs")
        values = {name: getattr(whole, name)[tokens].tolist() for name in names}
        part = make_inputs(lengths[first:last], totals=totals, **values)
        share = loss(part)
        share.loss.backward()
        total += share.loss.item()
        grads.append(part.logprobs.grad)
        metrics.append(share.metrics)
    assert total == pytest.approx(outputs.loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), whole.logprobs.grad)
    for name, value in outputs.metrics.items():
        shares = [part[name].item() for part in metrics]
        joined = max(shares) if name.startswith("max/") else sum(shares)
        assert joined == pytest.approx(value.item(), abs=1e-12), name
        assert not value.requires_grad


def test_an_absurd_ratio_stays_finite() -> None:
    inputs = make_inputs([2], logprobs=[0.0, -900.0], old_logprobs=[-900.0, 0.0], advantages=[-1.0, 1.0])
    outputs = PolicyLoss(kl_coefficient=0.1)(inputs)
    outputs.loss.backward()
    assert math.isfinite(outputs.loss.item())
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(inputs.logprobs.grad).all()


def test_it_travels_to_another_process() -> None:
    loss = PolicyLoss(clip_high=0.28, aggregation="token_mean")
    assert pickle.loads(pickle.dumps(loss)) == loss
