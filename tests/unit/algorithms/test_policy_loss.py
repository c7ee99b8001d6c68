"""The policy loss and the critic's: numbers by hand, and what they refuse. All settings: `test_loss_parts`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference_loss as paper
import torch
from cases import loss_inputs_of

from roll.algorithms.correction import Correction
from roll.algorithms.gates import MinClip, SignSplit
from roll.algorithms.kl import estimate_kl
from roll.algorithms.losses import PolicyLoss, UserLoss, ValueLoss
from roll.algorithms.ratio import compute_log_ratio
from roll.config.algorithm import AlgorithmConfig
from roll.errors import LossError
from roll.pipelines.learning.losses import build_policy_loss
from roll.types import LossInputs


def inputs_of(*sequences: dict[str, list[float]]) -> LossInputs:
    """Sequences by their probabilities (`new`, `old`, `rollout`, `ref`) and advantages."""
    answers = []
    for given in sequences:
        new = given["new"]
        logs = {name: [math.log(p) for p in given.get(name, new)] for name in ("new", "old", "rollout", "ref")}
        logs["rollout"] = [math.log(p) for p in given.get("rollout", given.get("old", new))]
        chunks = [int(c) for c in given.get("chunks", [0.0] * len(new))]
        advantages = given.get("advantages", [1.0] * len(new))
        answers.append(paper.Answer(held=logs["new"], advantages=advantages, chunks=chunks, **logs))
    return loss_inputs_of(answers, longest=8)


def gradient(loss: PolicyLoss, inputs: LossInputs) -> tuple[float, list[float]]:
    outputs = loss(inputs)
    outputs.loss.backward()
    assert inputs.logprobs.grad is not None
    return outputs.loss.item(), inputs.logprobs.grad.tolist()


@pytest.mark.parametrize("name", ["tis", "topr", "weighted_topr", "cispo", "decoupled_ppo", "ipa"])
def test_policy_loss_a_wrong_token_that_became_ten_times_less_likely_since_it_was_sampled_weighs_a_tenth(
    name: str,
) -> None:
    """At a batch's only update, where the trainer's policy before the update is the current one."""
    loss = build_policy_loss(AlgorithmConfig.model_validate({"type": name}))
    assert isinstance(loss, PolicyLoss)
    found = []
    for sampled in (0.05, 0.5):
        inputs = inputs_of({"new": [0.05], "rollout": [sampled], "advantages": [-1.0]})
        found.append(gradient(loss, inputs)[1][0])
    fresh, stale = found
    assert fresh > 0
    assert stale == pytest.approx(0.1 * fresh)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("away", [-300.0, -19.0, 0.5, 21.0, 90.0])
def test_policy_loss_kimis_penalty_pulls_however_far_the_policy_has_gone(away: float, level: str) -> None:
    """d/dlogprob of -(A log pi - tau/2 (log pi - log old)^2) is -(A - tau (log pi - log old)); nothing is clamped."""
    inputs = replace(inputs_of({"new": [0.5], "advantages": [1.0]}), old_logprobs=torch.tensor([math.log(0.5) - away]))
    loss = build_policy_loss(
        AlgorithmConfig.model_validate({"type": "kimi15", "ratio": {"level": level}, "correction": {"upper": None}})
    )
    outputs = loss(inputs)
    outputs.loss.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.item() == pytest.approx(-(1.0 - 0.1 * away), rel=1e-5)
    assert all(torch.isfinite(value) for value in (*outputs.metrics.values(), *outputs.maxima.values()))


def test_policy_loss_ppos_clip_gradient_and_metrics_by_hand() -> None:
    inputs = inputs_of(
        {"new": [0.5], "old": [0.4], "advantages": [1.0]},  # ratio 1.25
        {"new": [0.6, 0.2], "old": [0.4, 0.4], "advantages": [-1.0, -2.0]},  # 1.5, 0.5
    )
    loss = PolicyLoss(gate=MinClip(low=0.2, high=0.28))
    value, found = gradient(loss, inputs)
    # token 1: 1.25 < 1.28, unclipped: 1.25. Token 2: min(-1.5, -1.28) = -1.5, unclipped. Token 3: min(-1, -1.6) = -1.6.
    assert value == pytest.approx(-(1.25 / 1 + (-1.5 - 1.6) / 2) / 2)
    # d(r A)/dlogprob = r A where not clipped, else 0; weights 1/2, 1/4, 1/4
    assert found == pytest.approx([-1.25 / 2, 1.5 / 4, 0.0])
    metrics = {name: value.item() for name, value in loss(inputs).metrics.items()}
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/ratio"] == pytest.approx((1.25 + 1.5 + 0.5) / 3)
    assert loss(inputs).maxima["policy/ratio"].item() == pytest.approx(1.5)
    assert metrics["policy/entropy_estimate"] == pytest.approx(-math.log(0.5 * 0.6 * 0.2) / 3)
    assert metrics["policy/loss_scale"] == pytest.approx((1.25 + (1.5 + 1.0) / 2) / 2)
    expected_kl = sum(r - 1 - math.log(r) for r in (1.25, 1.5, 0.5)) / 3
    assert metrics["policy/approximate_kl"] == pytest.approx(expected_kl)


def test_policy_loss_the_engines_mismatch_by_hand() -> None:
    inputs = inputs_of(
        {"new": [0.5, 0.5], "old": [0.5, 0.5], "rollout": [0.2, 0.5]},  # old / rollout: 2.5, 1
        {"new": [0.5], "old": [0.5], "rollout": [1.0]},  # 0.5
    )
    loss = PolicyLoss(aggregation="token_mean", correction=Correction(upper=2.0, mask_low=0.6))
    value, found = gradient(loss, inputs)
    assert value == pytest.approx(-(2.0 + 1.0 + 0.0) / 3)
    assert found == pytest.approx([-2 / 3, -1 / 3, 0.0])
    metrics = {name: value.item() for name, value in loss(inputs).metrics.items()}
    assert metrics["mismatch/factor"] == pytest.approx(4.0 / 3)
    assert metrics["mismatch/factor_squared"] == pytest.approx((6.25 + 1.0 + 0.25) / 3)
    assert loss(inputs).maxima["mismatch/factor"].item() == pytest.approx(2.5)
    assert metrics["mismatch/truncated"] == pytest.approx(1 / 3)
    assert metrics["mismatch/masked"] == pytest.approx(1 / 3)
    assert metrics["mismatch/kl"] == pytest.approx(sum(w - 1 - math.log(w) for w in (2.5, 1.0, 0.5)) / 3)


def test_policy_loss_a_veto_leaves_the_whole_sequence_out() -> None:
    inputs = inputs_of({"new": [0.5, 0.5], "old": [0.5, 0.01], "rollout": [0.5, 0.5]}, {"new": [0.5], "rollout": [0.5]})
    assert Correction(veto=0.1).compute_weights(inputs).tolist() == [0.0, 0.0, 1.0]


def test_policy_loss_ratios_of_chunks_and_sequences_by_hand() -> None:
    # log-ratios: log 2, log 8 | log 1/2, in chunks {0, 1}, {2}
    inputs = inputs_of({"new": [0.2, 0.8, 0.1], "old": [0.1, 0.1, 0.2], "chunks": [0, 0, 1]})
    found = {
        (level, reduce): compute_log_ratio(inputs, level=level, reduce=reduce).exp().tolist()  # type: ignore[arg-type]
        for level in ("token", "chunk", "sequence")
        for reduce in ("geometric", "product")
    }
    assert found["token", "geometric"] == pytest.approx([2, 8, 0.5])
    assert found["chunk", "geometric"] == pytest.approx([4, 4, 0.5])
    assert found["chunk", "product"] == pytest.approx([16, 16, 0.5])
    assert found["sequence", "geometric"] == pytest.approx([2, 2, 2])
    assert found["sequence", "product"] == pytest.approx([8, 8, 8])


def test_policy_loss_tokens_that_gmpo_cuts_count_as_clipped() -> None:
    """log 2 = 0.69 is above its limit of 0.4, log 1.25 = 0.22 is not; a ratio below 1 raises no objective of A > 0."""
    up = {"new": [0.4, 0.5, 0.1], "old": [0.2, 0.4, 0.4], "advantages": [1.0, 1.0, 1.0]}
    down = {"new": [0.4, 0.1], "old": [0.2, 0.4], "advantages": [-1.0, -1.0]}
    outputs = build_policy_loss(AlgorithmConfig(type="gmpo"))(inputs_of(up, down))
    assert outputs.metrics["policy/clip_fraction"].item() == pytest.approx(2 / 5)
    # the means of log-ratios: (0.4 + log 1.25 + log 0.25) / 3 and (log 2 - 0.4) / 2
    first, second = math.exp((0.4 + math.log(1.25 * 0.25)) / 3), math.exp((math.log(2) - 0.4) / 2)
    assert outputs.loss.item() == pytest.approx(-(first - second) / 2)


STALE = {
    # what the engine sampled at 0.2, 0.4 and 0.1 the trainer has at 0.4, 0.2 and 0.5 before its only update
    "tis": [1.0, 0.5, 1.0],
    "cispo": [2.0, 0.5, 3.0],
    "topr": [1.0, 0.5, 1.0],
    "weighted_topr": [0.5, 0.25, 0.5],
}


@pytest.mark.parametrize("name", STALE)
def test_policy_loss_losses_for_stale_rollouts_weigh_against_the_engine_at_the_only_update(name: Any) -> None:
    loss = build_policy_loss(AlgorithmConfig(type=name))
    for sign in (-1.0, 1.0):
        stale = {"new": [0.4, 0.2, 0.5], "rollout": [0.2, 0.4, 0.1], "advantages": [sign] * 3}
        _, found = gradient(loss, inputs_of(stale))
        weights = [1.0] * 3 if sign > 0 and "topr" in name else STALE[name]
        assert found == pytest.approx([-sign * w / 3 for w in weights])


def test_policy_loss_an_expert_is_imitated_whatever_the_ratio() -> None:
    inputs = inputs_of({"new": [0.5], "old": [0.001], "rollout": [0.9], "advantages": [3.0]}, {"new": [0.5]})
    experts = replace(inputs, expert=torch.tensor([True, False]))
    value, found = gradient(PolicyLoss(gate=SignSplit()), experts)
    assert value == pytest.approx(-(3.0 * math.log(0.5) + math.log(0.5)) / 2)
    assert found == pytest.approx([-1.5, -0.5])


def test_policy_loss_kl_estimators_by_hand() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.1)], dtype=torch.float64)
    ref = torch.tensor([math.log(0.25), math.log(0.2)], dtype=torch.float64)
    k1, k2, k3, absolute = (estimate_kl(logprobs, ref, n).tolist() for n in ("k1", "k2", "k3", "absolute"))
    assert k1 == pytest.approx([math.log(2), -math.log(2)])
    assert k2 == pytest.approx([math.log(2) ** 2 / 2] * 2)
    assert k3 == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2)])
    assert absolute == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute"])
def test_policy_loss_a_divergence_of_arrays_is_that_of_tensors(estimator: Any) -> None:
    logprobs, ref = torch.tensor([[-0.1, -3.0, -90.0, -0.2], [-0.4, -0.1, -1.0, -0.2]], dtype=torch.float64)
    found = estimate_kl(logprobs.numpy(), ref.numpy(), estimator)
    assert found == pytest.approx(estimate_kl(logprobs, ref, estimator).numpy(), rel=1e-14)


def test_policy_loss_k1_and_k3_are_unbiased_and_the_gradient_of_k2_is_that_of_the_true_divergence() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 0.1], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    truth = (logp.exp() * (logp - ref)).sum()
    probabilities = logp.exp().detach()
    for estimator in ("k1", "k3"):
        assert (probabilities * estimate_kl(logp, ref, estimator)).sum().item() == pytest.approx(truth.item())
    (expected,) = torch.autograd.grad(truth, logits, retain_graph=True)
    (found,) = torch.autograd.grad((probabilities * estimate_kl(logp, ref, "k2")).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (PolicyLoss(kl_coefficient=0.5), "ref_logprobs"),
        (PolicyLoss(kl_coefficient=0.5, kl_estimator="full"), "full_kl"),
        (PolicyLoss(entropy_coefficient=0.5), "entropy"),
    ],
)
def test_policy_loss_terms_say_what_they_need(loss: PolicyLoss, missing: str) -> None:
    inputs = replace(inputs_of({"new": [0.5]}), ref_logprobs=None, full_kl=None, entropy=None)
    with pytest.raises(ValueError, match=missing):
        loss(inputs)
    assert math.isfinite(PolicyLoss()(inputs).loss.item())


def test_policy_loss_what_the_trainer_must_bring() -> None:
    assert PolicyLoss(entropy_coefficient=0.1).needs.entropy
    assert PolicyLoss(kl_coefficient=0.1, kl_estimator="full").needs.full_kl
    assert not PolicyLoss(kl_estimator="full").needs.full_kl
    assert not PolicyLoss(kl_coefficient=0.1).needs.entropy


def test_policy_loss_the_critics_loss_by_hand() -> None:
    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    inputs = replace(
        inputs_of({"new": [0.5, 0.5]}), values=column(1.0, 0.0), old_values=column(0.0, 0.0), returns=column(2.0, 1.0)
    )
    # plain: 1/2 x mean(1, 1). With a clip of 0.5 the first value counts as 0.5: error 2.25 > 1
    assert ValueLoss()(inputs).loss.item() == pytest.approx(0.5)
    outputs = ValueLoss(clip=0.5)(inputs)
    assert outputs.loss.item() == pytest.approx((2.25 + 1) / 4)
    metrics = {name: value.item() for name, value in outputs.metrics.items()}
    assert metrics["value/clip_fraction"] == pytest.approx(0.5)
    assert (metrics["value/mean"], metrics["value/error"]) == pytest.approx((0.5, 1.0))
    assert (metrics["value/return"], metrics["value/return_squared"]) == pytest.approx((1.5, 2.5))
    with pytest.raises(ValueError, match="old_values"):
        ValueLoss(clip=0.5)(replace(inputs, old_values=None))
    with pytest.raises(ValueError, match="returns"):
        ValueLoss()(replace(inputs, returns=None))


def test_policy_loss_a_loss_of_the_users_runs_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from roll.algorithms.inputs import LossOutputs\n"
        "def loss(inputs):\n"
        "    return LossOutputs(loss=-(inputs.advantages * inputs.logprobs).sum() / inputs.num_tokens)\n"
        "def number(inputs):\n"
        "    return 3.0\n"
    )
    inputs = inputs_of({"new": [0.5, 0.25], "advantages": [1.0, 2.0]})
    assert UserLoss(path=f"{file}:loss")(inputs).loss.item() == pytest.approx(5 * math.log(2) / 2)
    with pytest.raises(LossError, match="returned float; expected LossOutputs"):
        UserLoss(path=f"{file}:number")(inputs)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("loss=0.5", "a loss that is float; expected a scalar tensor"),
        ("loss=inputs.logprobs", r"a loss that is a tensor of shape \(2,\); expected a scalar tensor"),
        ("loss=inputs.logprobs.detach().sum()", "a loss without a gradient: compute it from inputs.logprobs"),
        ("loss=inputs.logprobs.sum(), metrics={'own/x': 'high'}", "the metric 'own/x' as str; expected a number"),
    ],
)
def test_policy_loss_a_loss_of_the_users_that_returns_what_no_trainer_can_use_is_named(
    tmp_path: Path, returned: str, words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from roll.types import LossOutputs\ndef loss(inputs):\n    return LossOutputs({returned})\n")
    with pytest.raises(LossError, match=rf"loss '{file}:loss' returned {words}"):
        UserLoss(path=f"{file}:loss")(inputs_of({"new": [0.5, 0.25]}))
