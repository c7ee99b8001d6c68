"""Losses of texts, pairs and scores: value and gradient are the papers', whole or in shares, and stay finite."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import reference_pairs as paper
import torch
from pair_helpers import PAIRS, REFERENCE_FREE, SINGLE, inputs_of, random_pairs, without_reference
from reference_pairs import Padded

from roll.algorithms.losses import BradleyTerryLoss, LikelihoodLoss, RegressionLoss
from roll.algorithms.losses.preference import KTOLoss, PreferenceLoss, compute_reference_point, pairwise
from roll.protocols import LossFn
from roll.types import LossInputs

LIMIT = {"rtol": 1e-9, "atol": 1e-12}
SCORED = {
    "bradley-terry": (BradleyTerryLoss(), paper.bradley_terry),
    "centred": (BradleyTerryLoss(centering=0.3), lambda b: paper.bradley_terry(b, 0.3)),
}


def check(loss: LossFn, expected: torch.Tensor, batch: Padded, column: str = "logprobs") -> None:
    """Over the whole batch, and in micro-batches of whole pairs in another order."""
    own = getattr(batch, column)
    (right,) = torch.autograd.grad(expected, own)
    pairs = sorted(set(batch.pair), reverse=True)
    by_pair = [[row for row, pair in enumerate(batch.pair) if pair == p] for p in pairs]
    cuts = [[range(len(batch.pair))], by_pair, [[*chain(*by_pair[:2])], [*chain(*by_pair[2:])]]]
    for rows in cuts:
        found = [
            loss(_scored(inputs_of(batch, part)) if column == "values" else inputs_of(batch, part))
            for part in rows
            if part
        ]
        total = torch.stack([outputs.loss for outputs in found]).sum()
        np.testing.assert_allclose(total.item(), expected.item(), **LIMIT)
        (grad,) = torch.autograd.grad(total, own)
        np.testing.assert_allclose(grad.numpy(), right.numpy(), **LIMIT)


def _scored(inputs):
    """A reward model's: one loss token of each sequence."""
    size = len(inputs.sequence_lengths)
    return replace(inputs, sequence_ids=torch.arange(size), sequence_lengths=torch.ones(size), logprobs=None)


@pytest.mark.parametrize("targets", [False, True], ids=["", "margins"])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("num_pairs", [1, 5])
def test_preference_loss_pairs(name: str, num_pairs: int, targets: bool) -> None:
    loss, expected = PAIRS[name]
    if targets and not loss.pairwise_loss.supports_margin:
        with pytest.raises(ValueError, match="pairs must not have margins"):
            loss(inputs_of(random_pairs(1, targets=True)))
        return
    for seed in range(3):
        batch = random_pairs(seed, num_pairs, targets=targets)
        check(loss, expected(batch), batch)


@pytest.mark.parametrize("name", SINGLE)
def test_preference_loss_texts_and_answers_on_their_own(name: str) -> None:
    loss, expected = SINGLE[name]
    for seed in range(3):
        batch = random_pairs(seed)
        check(loss, expected(batch), batch)


@pytest.mark.parametrize("targets", [False, True], ids=["", "margins"])
@pytest.mark.parametrize("name", SCORED)
def test_preference_loss_scores_of_pairs(name: str, targets: bool) -> None:
    loss, expected = SCORED[name]
    batch = random_pairs(3, targets=targets)
    check(loss, expected(batch), batch, "values")


def test_preference_loss_scores_of_texts() -> None:
    batch = random_pairs(4, targets=True)
    check(RegressionLoss(), paper.regression(batch), batch, "values")


@pytest.mark.parametrize("name", REFERENCE_FREE)
def test_preference_loss_methods_without_a_reference_need_none(name: str) -> None:
    loss, expected = PAIRS[name]
    batch = random_pairs(5)
    assert loss(without_reference(inputs_of(batch))).loss.item() == pytest.approx(expected(batch).item(), rel=1e-9)


def test_preference_loss_what_does_not_come_is_named() -> None:
    inputs = inputs_of(random_pairs(0))
    for loss, lacking in (
        (PreferenceLoss(), "ref_logprobs"),
        (PreferenceLoss(), "preferred"),
        (KTOLoss(reference_point=0.0), "ref_logprobs"),
        (KTOLoss(reference_point=0.0), "preferred"),
        (LikelihoodLoss(), "logprobs"),
        (RegressionLoss(), "targets"),
        (BradleyTerryLoss(), "values"),
    ):
        given = _scored(inputs) if isinstance(loss, RegressionLoss | BradleyTerryLoss) else inputs
        with pytest.raises(ValueError, match=f"this loss requires {lacking}, but the batch has none"):
            loss(replace(given, **{lacking: None}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0], "has 1 answers"),
        ([0, 1, 2], "has [13] answers"),
        ([0, 0], "has 2 answers with a loss token, [02] of them"),
    ],
)
def test_preference_loss_what_is_no_pair_is_refused(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceLoss()(inputs_of(random_pairs(0), rows))


def test_preference_loss_a_reward_models_samples_have_one_loss_token_each() -> None:
    with pytest.raises(ValueError, match="exactly one loss token per sample"):
        BradleyTerryLoss()(replace(inputs_of(random_pairs(0)), values=torch.zeros(99)))


def test_preference_loss_settings_without_a_meaning_are_refused() -> None:
    for wrong in (
        lambda: PreferenceLoss(beta=0.0),
        lambda: PreferenceLoss(pairwise_loss=pairwise.ApoZeroLoss(), margin=1.0),
        lambda: PreferenceLoss(pairwise_loss=pairwise.OddsRatioLoss()),
        lambda: pairwise.SigmoidLoss(label_smoothing=0.5),
        lambda: pairwise.ExoPairLoss(label_smoothing=0.0),
        lambda: pairwise.DiscopopLoss(tau=1.0),
        lambda: compute_reference_point([], []),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_preference_loss_metrics_are_the_whole_batchs_however_it_is_cut() -> None:
    batch = random_pairs(6)
    chosen, rejected = batch.rows()
    ratios = paper.summed(batch.logprobs - batch.ref, batch.mask).detach()
    sums = paper.summed(batch.logprobs, batch.mask).detach()
    by_pair = [[row for row, pair in enumerate(batch.pair) if pair == p] for p in range(5)]

    def metrics(loss: LossFn) -> dict[str, float]:
        found = [loss(inputs_of(batch, rows)).metrics for rows in by_pair]
        return {name: sum(own[name].item() for own in found) for name in found[0]}

    assert metrics(PreferenceLoss(beta=0.5, likelihood=3.0)) == pytest.approx({
        "preference/reward_chosen": 0.5 * ratios[chosen].mean().item(),
        "preference/reward_rejected": 0.5 * ratios[rejected].mean().item(),
        "preference/margin": 0.5 * (ratios[chosen] - ratios[rejected]).mean().item(),
        "preference/accuracy": (ratios[chosen] > ratios[rejected]).double().mean().item(),
        "preference/logprob_chosen": sums[chosen].mean().item(),
        "preference/logprob_rejected": sums[rejected].mean().item(),
        "preference/nll": paper.chosen_likelihood(batch).item(),
    })  # fmt: skip
    assert metrics(KTOLoss(reference_point=0.3)) == pytest.approx({
        "preference/reward_chosen": 0.1 * ratios[chosen].mean().item(),
        "preference/reward_rejected": 0.1 * ratios[rejected].mean().item(),
        "preference/margin": 0.1 * (ratios[chosen] - ratios[rejected]).mean().item(),
        "preference/accuracy": torch.cat([ratios[chosen] > 0.3, ratios[rejected] <= 0.3]).double().mean().item(),
        "preference/reference_point": 0.3,
    })  # fmt: skip
    assert metrics(LikelihoodLoss(aggregation="sequence_mean")) == pytest.approx(
        {"sft/nll": paper.likelihood(batch, "token_mean").item()}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*PAIRS, *SINGLE])
@pytest.mark.parametrize("size", [0.0, 1e-8, 1e4])
def test_preference_loss_extreme_sequences_stay_finite(name: str, size: float, dtype: torch.dtype) -> None:
    """One pair whose log-ratios are 0, or as far apart as they come, either way round; certain answers among them."""
    loss = (PAIRS | SINGLE)[name][0]
    for better, worse in ((-size, 0.0), (0.0, -size), (-size, -size)):
        one = torch.tensor([[better], [worse]], dtype=torch.float64).to(dtype).requires_grad_()
        ref = torch.tensor([[worse], [better]], dtype=torch.float64).to(dtype)
        batch = Padded(logprobs=one, ref=ref, mask=torch.ones(2, 1), preferred=[True, False], pair=[0, 0])
        outputs = loss(replace(inputs_of(batch), sequence_lengths=torch.ones(2, dtype=dtype)))
        outputs.loss.backward()
        assert torch.isfinite(outputs.loss)
        assert one.grad is not None and torch.isfinite(one.grad).all()
        assert all(torch.isfinite(value) for value in outputs.metrics.values())


def test_preference_loss_answers_that_score_alike_are_in_no_order() -> None:
    batch = random_pairs(0, 3)
    alike = replace(batch, ref=batch.logprobs.detach(), values=torch.ones(6, dtype=torch.float64))
    inputs = inputs_of(alike)
    assert PreferenceLoss()(inputs).metrics["preference/accuracy"] == 0.5
    assert BradleyTerryLoss()(_scored(inputs)).metrics["reward_model/accuracy"] == 0.5


def test_preference_loss_kto_without_an_answer_of_one_kind_has_finite_metrics() -> None:
    batch = replace(random_pairs(0), preferred=[True] * 10, pair=list(range(10)))
    metrics = KTOLoss(reference_point=0.0)(inputs_of(batch)).metrics
    assert metrics["preference/reward_rejected"] == 0.0
    assert all(torch.isfinite(value) for value in metrics.values())


def test_preference_loss_the_reference_point_is_never_below_zero() -> None:
    assert compute_reference_point([-3.0, -5.0], [-4.0, -7.0]) == pytest.approx(1.5)
    assert compute_reference_point([-4.0], [-3.0]) == 0.0


def test_preference_loss_losses_travel_to_other_processes() -> None:
    for loss, _ in [*PAIRS.values(), *SINGLE.values(), *SCORED.values()]:
        assert pickle.loads(pickle.dumps(loss)) == loss


def test_preference_loss_accuracy_of_pairs_counts_a_tie_as_half() -> None:
    """Scores (policy less reference) of the chosen and the rejected answer: higher, equal, lower, equal."""
    answers = [(2.0, 1.0), (1.5, 1.5), (0.0, 1.0), (-1.0, -1.0)]
    inputs = LossInputs(
        logprobs=torch.tensor([x for pair in answers for x in pair], dtype=torch.float64),
        ref_logprobs=torch.zeros(8, dtype=torch.float64),
        values=torch.tensor([x for pair in answers for x in pair], dtype=torch.float64),
        sequence_ids=torch.arange(8),
        sequence_lengths=torch.ones(8, dtype=torch.float64),
        max_lengths=torch.ones(8, dtype=torch.float64),
        unit_ids=torch.arange(8) // 2,
        preferred=torch.arange(8) % 2 == 0,
        num_tokens=8.0,
        num_sequences=8.0,
        num_units=4.0,
        num_preferred=4.0,
        num_preferred_tokens=4.0,
    )
    assert PreferenceLoss()(inputs).metrics["preference/accuracy"].item() == (1 + 0.5 + 0 + 0.5) / 4
    assert BradleyTerryLoss()(inputs).metrics["reward_model/accuracy"].item() == (1 + 0.5 + 0 + 0.5) / 4
    # wanted answers are right above 1, others below it: 1 + 1/2, 1 + 0, 0 + 1/2, 0 + 1
    kto = KTOLoss(reference_point=1.0)(inputs).metrics["preference/accuracy"].item()
    assert kto == pytest.approx((1 + 0.5 + 1 + 0 + 0 + 0.5 + 0 + 1) / 8)


def test_preference_loss_accuracy_of_an_untrained_policy_is_one_half() -> None:
    """Before the first step it is the reference: all scores are 0."""
    inputs = inputs_of(random_pairs(3))
    same = replace(inputs, ref_logprobs=inputs.require("logprobs").detach())
    assert PreferenceLoss()(same).metrics["preference/accuracy"].item() == 0.5
    assert KTOLoss(reference_point=0.0)(same).metrics["preference/accuracy"].item() == 0.5
