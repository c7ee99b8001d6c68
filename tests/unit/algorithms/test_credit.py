"""Attention credit: by hand, against loops written from the formulas, and what holds for any sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_credit import reference_factors

from roll.algorithms.credit import (
    compute_credit_factors,
    compute_distance_weights,
    compute_waad_jumps,
    group_heads,
    mask_top_fraction,
)
from roll.types import AttentionStatistics

PATTERNS = ("local", "global", "coupled")


def statistics(waad: list[float], fai: list[float]) -> AttentionStatistics:
    return AttentionStatistics(waad=np.array(waad, np.float32), fai=np.array(fai, np.float32))


def everywhere(n: int) -> np.ndarray:
    return np.ones(n, dtype=np.bool_)


def test_credit_assignment_statistics_of_a_small_map_by_hand() -> None:
    attention = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.4, 0.1, 0.2, 0.3]])
    of = compute_distance_weights(4, window=2, horizon=(1, 2))
    apart = np.maximum(np.arange(4)[:, None] - np.arange(4), 0)
    distance = (attention * of.distance[apart]).sum(1).mean()
    assert distance == pytest.approx((0 + 0.5 + 0.7 + (1.2 + 0.2 + 0.2)) / 4)
    waad = (attention * of.waad[apart]).sum(1)
    np.testing.assert_allclose(waad, [0, 0.5, 0.7, 0.8 + 0.2 + 0.2])  # the distance of 3 counts as 2
    fai = (attention * of.fai[apart]).sum(0) / of.num_followers
    np.testing.assert_allclose(fai, [(0.5 + 0.2) / 2, (0.3 + 0.1) / 2, 0.2, 0], atol=1e-7)


def test_credit_assignment_heads_are_sorted_by_distance() -> None:
    local, far = group_heads(np.array([5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 4.0, 6.0, 8.0, 0.5]))
    assert local.tolist() == [1, 3, 9]
    assert far.tolist() == [2, 4, 8]
    assert [g.tolist() for g in group_heads(np.array([3.0]))] == [[0], [0]]


def test_credit_assignment_top_share_rounds_up_and_leaves_zeros_and_masked_tokens_out() -> None:
    scores = np.array([0.0, 3.0, 9.0, 2.0, 2.0, 0.0], np.float32)
    mask = np.array([1, 1, 0, 1, 1, 1], dtype=np.bool_)
    assert np.flatnonzero(mask_top_fraction(scores, mask, 0.4)).tolist() == [1, 3]  # 2 of 5; of equal ones the earlier
    assert np.flatnonzero(mask_top_fraction(scores, mask, 0.41)).tolist() == [1, 3, 4]
    assert np.flatnonzero(mask_top_fraction(scores, mask, 1.0)).tolist() == [1, 3, 4]
    ten = np.arange(1, 31, dtype=np.float32)
    assert mask_top_fraction(ten, everywhere(30), 0.1).sum() == 3


def test_credit_assignment_local_amplifies_the_largest_jumps() -> None:
    sample = statistics([1, 4, 4, 9, 2], [0, 0, 0, 0, 0])
    assert compute_waad_jumps(sample.waad, everywhere(5)).tolist() == [3, 0, 5, 7, 0]
    gap = np.array([1, 1, 1, 0, 1], dtype=np.bool_)  # an environment's token: a turn ends before it
    assert compute_waad_jumps(sample.waad, gap).tolist() == [3, 0, 0, 0, 0]
    found = compute_credit_factors(sample, everywhere(5), pattern="local", share=0.4)
    assert found.tolist() == [1, 1, 1.5, 1.5, 1]
    assert found.dtype == np.float32


def test_credit_assignment_global_amplifies_anchors() -> None:
    sample = statistics([0, 0, 0, 0, 0], [0.1, 0.5, 0.2, 0.4, 0])
    found = compute_credit_factors(sample, everywhere(5), pattern="global", share=0.4, amplification=2.0)
    assert found.tolist() == [1, 2, 1, 2, 1]


def test_credit_assignment_coupled_shares_a_dominated_anchors_amplification_with_its_introduction() -> None:
    #                    0  1  2  3  4  5  6  7  8  9
    sample = statistics([1, 1, 8, 1, 1, 1, 1, 9, 9, 9], [0, 0, 0, 0.9, 0, 0.5, 0, 0.7, 0, 0.8])
    # anchors 3, 5, 7, 9; jumps 0 7 7 0 0 0 8 0 0 0; median WAAD 1, so 3 and 5 are calm; 0.6 quantile of jumps 0.
    # 3: largest jump before it within 3 is 7, at 1 and 2; the nearer is 2. 5: within 2 … 4 the jump at 2.
    # 7 and 9 look far back themselves and keep everything.
    found = compute_credit_factors(sample, everywhere(10), pattern="coupled", introduction_share=0.25)
    assert found.tolist() == [1, 1, 1.125, 1.375, 1, 1.375, 1, 1.5, 1, 1.5]
    nearer = compute_credit_factors(
        sample, everywhere(10), pattern="coupled", introduction_share=0.25, introduction_window=2
    )
    assert nearer.tolist() == [1, 1, 1.125, 1.375, 1, 1.5, 1, 1.5, 1, 1.5]  # 5 finds no jump at 3 or 4
    kept = compute_credit_factors(sample, everywhere(10), pattern="coupled", introduction_share=0.0)
    assert kept.tolist() == compute_credit_factors(sample, everywhere(10), pattern="global").tolist()
    none_calm = compute_credit_factors(
        sample, everywhere(10), pattern="coupled", introduction_share=0.25, jump_quantile=0.95
    )
    assert none_calm.tolist() == kept.tolist()  # a jump of 7 is not among the top 5 %


def test_credit_assignment_an_introduction_that_is_an_anchor_itself_gets_at_most_the_whole_amplification() -> None:
    sample = statistics([9, 1, 1, 1, 1], [0.9, 0.8, 0, 0, 0])
    found = compute_credit_factors(sample, everywhere(5), pattern="coupled", introduction_share=0.5)
    assert found.tolist() == [1.5, 1.25, 1, 1, 1]


levels = st.integers(0, 12).map(lambda i: i / 4)  # exact in float32, and often equal


@st.composite
def samples(draw: st.DrawFn) -> tuple[AttentionStatistics, np.ndarray]:
    n = draw(st.integers(1, 25))
    values = [draw(st.lists(levels, min_size=n, max_size=n)) for _ in range(2)]
    mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=np.bool_)
    return statistics(*values), mask


settings = st.fixed_dictionaries({
    "pattern": st.sampled_from(PATTERNS),
    "amplification": st.sampled_from([1.0, 1.5, 3.0]),
    "share": st.sampled_from([0.1, 0.4, 1.0]),
    "introduction_window": st.integers(1, 30),
    "introduction_share": st.sampled_from([0.0, 0.5, 1.0]),
    "waad_quantile": st.sampled_from([0.0, 0.5, 1.0]),
    "jump_quantile": st.sampled_from([0.0, 0.5, 1.0]),
})  # fmt: skip


@given(samples(), settings)
def test_credit_assignment_factors_equal_loops_over_the_formulas(
    sample: tuple[AttentionStatistics, np.ndarray], options: dict
) -> None:
    of_sample, mask = sample
    found = compute_credit_factors(of_sample, mask, **options)
    expected = reference_factors(of_sample.waad.tolist(), of_sample.fai.tolist(), mask.tolist(), options)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@given(samples(), settings)
def test_credit_assignment_factors_lie_between_one_and_the_amplification_and_are_one_outside_the_mask(
    sample: tuple[AttentionStatistics, np.ndarray], options: dict
) -> None:
    of_sample, mask = sample
    found = compute_credit_factors(of_sample, mask, **options)
    assert found.shape == mask.shape
    assert (found >= 1).all()
    assert (found <= np.float32(options["amplification"])).all()
    assert (found[~mask] == 1).all()


@given(samples(), settings, st.integers(1, 9))
def test_credit_assignment_what_stands_before_or_after_a_sample_does_not_count(
    sample: tuple[AttentionStatistics, np.ndarray], options: dict, size: int
) -> None:
    of_sample, mask = sample
    wider = AttentionStatistics(
        waad=np.concatenate([np.full(size, 7, np.float32), of_sample.waad, np.full(size, 8, np.float32)]),
        fai=np.concatenate([np.full(size, 9, np.float32), of_sample.fai, np.full(size, 9, np.float32)]),
    )
    outside = np.zeros(size, dtype=np.bool_)
    found = compute_credit_factors(wider, np.concatenate([outside, mask, outside]), **options)
    assert found[size:-size].tolist() == compute_credit_factors(of_sample, mask, **options).tolist()


@given(samples(), settings, st.sampled_from([0.25, 2.0, 64.0]))
def test_credit_assignment_thresholds_follow_the_scale_of_the_statistics(
    sample: tuple[AttentionStatistics, np.ndarray], options: dict, scale: float
) -> None:
    of_sample, mask = sample
    scaled = AttentionStatistics(waad=of_sample.waad * np.float32(scale), fai=of_sample.fai * np.float32(scale))
    assert (
        compute_credit_factors(scaled, mask, **options).tolist()
        == compute_credit_factors(of_sample, mask, **options).tolist()
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_credit_assignment_an_answer_without_tokens_or_without_signal_is_left_alone(pattern: str) -> None:
    assert compute_credit_factors(statistics([], []), everywhere(0), pattern=pattern).tolist() == []
    flat = statistics([2] * 8, [0] * 8)
    assert compute_credit_factors(flat, everywhere(8), pattern=pattern).tolist() == [1] * 8
    assert compute_credit_factors(flat, ~everywhere(8), pattern=pattern).tolist() == [1] * 8
