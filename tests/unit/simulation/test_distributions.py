"""Quantiles by hand, and numbers that depend on their key alone."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.simulation import distributions as laws


def sample(quantile: laws.Quantile, count: int = 20_000) -> list[float]:
    return [quantile(laws.uniform_of(7, number)) for number in range(count)]


def test_uniform_numbers_are_uniform_and_independent_of_each_other() -> None:
    numbers = sample(lambda u: u)
    assert statistics.fmean(numbers) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(numbers) == pytest.approx(1 / 12, rel=0.03)
    assert statistics.correlation(numbers[:-1], numbers[1:]) == pytest.approx(0, abs=0.03)
    assert len(set(numbers)) == len(numbers)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_a_key_gives_one_number_strictly_between_0_and_1(key) -> None:
    assert 0 < laws.uniform_of(*key) == laws.uniform_of(*key) < 1


def test_keys_are_sequences_not_sums() -> None:
    assert len({laws.mix(1, 2), laws.mix(2, 1), laws.mix(3), laws.mix(0, 3), laws.mix(1, 2, 0)}) == 5


def test_lognormal_has_its_median_and_upper_quartile() -> None:
    law = laws.lognormal_of_quartile(585, 930)
    assert law(0.5) == pytest.approx(585)
    assert law(0.75) == pytest.approx(930)
    assert law(0.25) == pytest.approx(585**2 / 930)


def test_pareto_by_hand() -> None:
    law = laws.pareto(10, 2)
    assert law(0) == 10
    assert law(0.75) == pytest.approx(20)  # P(X > 20) = (10/20)^2 = 1/4
    assert law(0.99) == pytest.approx(100)


def test_a_normal_without_its_negative_part_has_the_moments_of_the_textbook() -> None:
    # N(10, 10) on x > 0: mean = 10 + 10 phi(1) / Phi(1) = 10 + 10 x 0.241971 / 0.841345 = 12.8760
    assert statistics.fmean(sample(laws.normal(10, 10))) == pytest.approx(12.876, rel=0.02)
    # max(0, N(10, 10)): mean = 10 Phi(1) + 10 phi(1) = 10.8332
    clipped = sample(laws.normal(10, 10, redraw=False))
    assert statistics.fmean(clipped) == pytest.approx(10.833, rel=0.02)
    assert clipped.count(0.0) / len(clipped) == pytest.approx(1 - 0.8413, abs=0.01)
    assert laws.normal(3, 0)(0.9) == 3


def test_quantiles_pass_through_their_points_and_two_of_them_are_a_lognormal() -> None:
    law = laws.with_quantiles({0.5: 585, 0.75: 930, 0.999: 16384})
    assert [law(p) for p in (0.5, 0.75, 0.999)] == pytest.approx([585, 930, 16384])
    two = laws.with_quantiles({0.5: 585, 0.75: 930})
    lognormal = laws.lognormal_of_quartile(585, 930)
    assert [two(p) for p in (0.01, 0.3, 0.9, 0.9999)] == pytest.approx([lognormal(p) for p in (0.01, 0.3, 0.9, 0.9999)])


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_quantiles_never_fall(low, high) -> None:
    low, high = sorted((low, high))
    for law in (
        laws.lognormal(10, 1),
        laws.pareto(1, 1.5),
        laws.normal(5, 3),
        laws.normal(5, 9, redraw=False),
        laws.uniform(1, 2),
        laws.empirical([5, 1, 3]),
        laws.with_quantiles({0.1: 1, 0.5: 4, 0.9: 100}),
        laws.clipped(laws.lognormal(10, 3), 5, 50),
    ):
        assert law(low) <= law(high) + 1e-12


def test_empirical_values_come_equally_often() -> None:
    drawn = sample(laws.empirical([3, 1, 2, 2]))
    assert [drawn.count(value) / len(drawn) for value in (1, 2, 3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_correlated_draws_are_uniform_again_and_as_alike_as_asked(rho: float) -> None:
    normal = statistics.NormalDist()
    pairs = []
    for number in range(10_000):
        shared = laws.uniform_of(1, number)
        pairs.append([laws.correlated(shared, laws.uniform_of(own, number), rho) for own in (2, 3)])
    first, second = zip(*pairs, strict=True)
    assert statistics.fmean(first) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(first) == pytest.approx(1 / 12, rel=0.05)
    found = statistics.correlation([normal.inv_cdf(u) for u in first], [normal.inv_cdf(u) for u in second])
    assert found == pytest.approx(rho, abs=0.03)


def test_what_is_no_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        laws.empirical([])
    with pytest.raises(ValueError, match="never positive"):
        laws.normal(-1000, 1)
    for points in ({0.5: 1}, {0: 1, 0.5: 2}, {0.1: 5, 0.5: 2}, {0.1: 0, 0.5: 2}):
        with pytest.raises(ValueError, match="quantiles"):
            laws.with_quantiles(points)
    assert math.isinf(laws.clipped(laws.fixed(math.inf))(0.5))
