"""An accuracy's interval, against bounds that solve Wilson's equation and published ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.tracking.console_views import EvaluationView
from roll.tracking.intervals import MIN_NUM_TRIALS, compute_accuracy_metrics, compute_wilson_interval, format_accuracy


@pytest.mark.parametrize(
    ("successes", "num", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_tracking_interval_accuracy_intervals_are_the_published_ones(
    successes: int, num: int, low: float, high: float
) -> None:
    assert compute_wilson_interval(successes / num, num) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500), st.floats(0, 1))
def test_tracking_interval_accuracy_intervals_hold_the_shares_that_are_1_96_deviations_away(
    num: int, share: float
) -> None:
    """A bound p solves |share - p| = z sqrt(p (1 - p) / n)."""
    bounds = compute_wilson_interval(share, num)
    assert 0 <= bounds[0] <= share + 1e-12 and share - 1e-12 <= bounds[1] <= 1
    for p in bounds:
        if 1e-6 < p < 1 - 1e-6:
            assert abs(share - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / num), abs=1e-9)


def test_tracking_interval_accuracy_figures_carry_their_number_and_of_few_their_interval() -> None:
    few = compute_accuracy_metrics("eval/", 0.5, MIN_NUM_TRIALS - 1)
    assert few.keys() == {"eval/accuracy", "eval/accuracy_n", "eval/accuracy_low", "eval/accuracy_high"}
    assert compute_accuracy_metrics("", 0.5, MIN_NUM_TRIALS) == {"accuracy": 0.5, "accuracy_n": 100.0}


def test_tracking_interval_accuracy_texts_carry_their_number_and_of_few_their_interval() -> None:
    assert format_accuracy(0.62, 50) == "0.620 of 50 (95 %: 0.482 to 0.741)"
    assert format_accuracy(0.62, 1234) == "0.620 of 1,234"
    assert format_accuracy(0.62, None) == "0.620"  # of a run that an earlier version recorded
    view = EvaluationView.from_metrics(3, {"eval/accuracy": 0.62, "eval/accuracy_n": 50.0, "eval/score": 0.62})
    assert view.text == "accuracy 0.620 of 50 (95 %: 0.482 to 0.741)"
    assert EvaluationView.from_metrics(3, {"eval/loss": 0.5, "eval/num_examples": 50.0}).text == "loss 0.500"
    rewards = {"eval/score": 0.25, "eval/verified_share": 0.0, "eval/num_answers": 6.0}
    assert EvaluationView.from_metrics(3, rewards | {"eval/infra_errors": 0.0}).text == "mean reward 0.250"
    failing = EvaluationView.from_metrics(3, rewards | {"eval/infra_errors": 102.0})
    assert failing.text == "mean reward 0.250 of 6 answers (102 failed)"
