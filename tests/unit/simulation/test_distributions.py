"""Quantiles by hand, and numbers that depend on their key alone."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.base import Section
from roll.config.distributions import (
    EmpiricalDistribution,
    LognormalDistribution,
    NormalDistribution,
    ParetoDistribution,
    Quantile,
    QuantilesDistribution,
    UniformDistribution,
)
from roll.errors import ConfigError
from roll.simulation import draws


def sample(quantile: Quantile, count: int = 20_000) -> list[float]:
    return [quantile(draws.draw_uniform(7, number)) for number in range(count)]


def test_simulation_distributions_uniform_numbers_are_uniform_and_independent_of_each_other() -> None:
    numbers = sample(lambda u: u)
    assert statistics.fmean(numbers) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(numbers) == pytest.approx(1 / 12, rel=0.03)
    assert statistics.correlation(numbers[:-1], numbers[1:]) == pytest.approx(0, abs=0.03)
    assert len(set(numbers)) == len(numbers)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_simulation_distributions_a_key_gives_one_number_strictly_between_0_and_1(key) -> None:
    assert 0 < draws.draw_uniform(*key) == draws.draw_uniform(*key) < 1


def test_simulation_distributions_keys_are_sequences_not_sums() -> None:
    assert (
        len(
            {
                draws.hash_key(1, 2),
                draws.hash_key(2, 1),
                draws.hash_key(3),
                draws.hash_key(0, 3),
                draws.hash_key(1, 2, 0),
            }
        )
        == 5
    )


def test_simulation_distributions_lognormal_has_its_median_and_upper_quartile() -> None:
    law = LognormalDistribution(median=585, p75=930).quantile_function()
    assert law(0.5) == pytest.approx(585)
    assert law(0.75) == pytest.approx(930)
    assert law(0.25) == pytest.approx(585**2 / 930)


def test_simulation_distributions_pareto_by_hand() -> None:
    law = ParetoDistribution(minimum=10, alpha=2, max=1000).quantile_function()
    assert law(0) == 10
    assert law(0.75) == pytest.approx(20)  # P(X > 20) = (10/20)^2 = 1/4
    assert law(0.99) == pytest.approx(100)


def test_simulation_distributions_a_normal_without_its_negative_part_has_the_moments_of_the_textbook() -> None:
    # N(10, 10) on x > 0: mean = 10 + 10 phi(1) / Phi(1) = 10 + 10 x 0.241971 / 0.841345 = 12.8760
    truncated = sample(NormalDistribution(mean=10, std=10).quantile_function())
    assert statistics.fmean(truncated) == pytest.approx(12.876, rel=0.02)
    # max(0, N(10, 10)): mean = 10 Phi(1) + 10 phi(1) = 10.8332
    clipped = sample(NormalDistribution(mean=10, std=10, negative="zero").quantile_function())
    assert statistics.fmean(clipped) == pytest.approx(10.833, rel=0.02)
    assert clipped.count(0.0) / len(clipped) == pytest.approx(1 - 0.8413, abs=0.01)
    assert NormalDistribution(mean=3, std=0).quantile_function()(0.9) == 3


def test_simulation_distributions_quantiles_pass_through_their_points_and_two_of_them_are_a_lognormal() -> None:
    law = QuantilesDistribution(points=[[0.5, 585], [0.75, 930], [0.999, 16384]]).quantile_function()
    assert [law(p) for p in (0.5, 0.75, 0.999)] == pytest.approx([585, 930, 16384])
    two = QuantilesDistribution(points=[[0.5, 585], [0.75, 930]]).quantile_function()
    lognormal = LognormalDistribution(median=585, p75=930).quantile_function()
    assert [two(p) for p in (0.01, 0.3, 0.9, 0.9999)] == pytest.approx([lognormal(p) for p in (0.01, 0.3, 0.9, 0.9999)])


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_simulation_distributions_quantiles_never_fall(low, high) -> None:
    low, high = sorted((low, high))
    for distribution in (
        LognormalDistribution(median=10, sigma=1),
        ParetoDistribution(minimum=1, alpha=1.5, max=1e9),
        NormalDistribution(mean=5, std=3),
        NormalDistribution(mean=5, std=9, negative="zero"),
        UniformDistribution(low=1, high=2),
        EmpiricalDistribution(values=[5, 1, 3]),
        QuantilesDistribution(points=[[0.1, 1], [0.5, 4], [0.9, 100]]),
        LognormalDistribution(median=10, sigma=3, max=50),
    ):
        law = distribution.quantile_function()
        assert law(low) <= law(high) + 1e-12


def test_simulation_distributions_empirical_values_come_equally_often() -> None:
    drawn = sample(EmpiricalDistribution(values=[3, 1, 2, 2]).quantile_function())
    assert [drawn.count(value) / len(drawn) for value in (1, 2, 3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_simulation_distributions_correlated_draws_are_uniform_again_and_as_alike_as_asked(rho: float) -> None:
    normal = statistics.NormalDist()
    pairs = []
    for number in range(10_000):
        shared = draws.draw_uniform(1, number)
        pairs.append([draws.correlate(shared, draws.draw_uniform(own, number), rho) for own in (2, 3)])
    first, second = zip(*pairs, strict=True)
    assert statistics.fmean(first) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(first) == pytest.approx(1 / 12, rel=0.05)
    found = statistics.correlation([normal.inv_cdf(u) for u in first], [normal.inv_cdf(u) for u in second])
    assert found == pytest.approx(rho, abs=0.03)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (NormalDistribution, {"mean": -1000, "std": 1}, "never positive: raise its mean"),
        (LognormalDistribution, {"median": 5, "p75": 4, "sigma": 1}, "exactly one of p75 and sigma"),
        (LognormalDistribution, {"median": 5, "p75": 4}, "must be >= median"),
        (EmpiricalDistribution, {}, "exactly one of values and file"),
        (EmpiricalDistribution, {"values": [1, -2]}, "values must be >= 0, got -2"),
        (QuantilesDistribution, {"points": [[0.5, 1]]}, "at least two points"),
        (QuantilesDistribution, {"points": [[0, 1], [0.5, 2]]}, "between 0 and 1"),
        (QuantilesDistribution, {"points": [[0.1, 5], [0.5, 2]]}, "points must be in ascending order"),
        (QuantilesDistribution, {"points": [[0.1, 0], [0.5, 2]]}, "values must be positive"),
    ],
)
def test_simulation_distributions_what_is_no_distribution_is_refused(
    kind: type[Section], values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_simulation_distributions_values_of_a_file_are_drawn_and_one_without_any_is_refused(tmp_path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n1\n")
    recorded = EmpiricalDistribution(file=str(file))
    assert [recorded.quantile_function()(u) for u in (0.1, 0.9)] == [1, 3]
    for text, message in (("", "at least one value"), ("-1", "every value must be >= 0"), ("many", "cannot be read")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            recorded.quantile_function()


def test_simulation_distributions_what_is_larger_than_the_limit_becomes_the_limit() -> None:
    assert LognormalDistribution(median=10, sigma=3, max=50).quantile_function()(0.99) == 50
    assert ParetoDistribution(minimum=10, alpha=2, max=15).quantile_function()(0.99) == 15
    assert QuantilesDistribution(points=[[0.5, 1], [0.9, 10]], max=5).quantile_function()(0.9) == 5
