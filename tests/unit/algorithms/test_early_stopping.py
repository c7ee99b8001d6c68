"""A group is doomed exactly where no outcome of its missing rewards passes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.filters import cannot_pass_filter, find_filter_reason

bounds = st.fixed_dictionaries(
    {},
    optional={
        "min_mean": st.sampled_from([0.0, 0.25, 0.5]),
        "max_mean": st.sampled_from([0.5, 0.75, 1.0]),
        "min_std": st.sampled_from([0.1, 0.3, 0.45]),
    },
)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=4), st.integers(1, 4), bounds)
def test_early_stopping_a_doomed_group_fails_whatever_comes(
    rewards: list[float], missing: int, filters: dict[str, float]
) -> None:
    outcomes = itertools.product([0.0, 0.25, 0.5, 1.0], repeat=missing)
    passes = any(
        not find_filter_reason(np.array([*rewards, *rest]), skip_zero_variance=False, **filters) for rest in outcomes
    )
    if cannot_pass_filter(rewards, missing, (0.0, 1.0), **filters):
        assert not passes


@pytest.mark.parametrize(
    ("rewards", "missing", "filters", "doomed"),
    [
        ([1.0, 1.0, 1.0], 1, {"max_mean": 0.7}, True),  # 3/4 at least
        ([1.0, 1.0, 0.0], 1, {"max_mean": 0.7}, False),  # 2/4 is possible
        ([0.0, 0.0, 0.0], 1, {"min_mean": 0.3}, True),
        ([0.0, 0.0], 2, {"min_mean": 0.3}, False),
        ([1.0, 1.0, 1.0, 1.0], 1, {"min_std": 0.45}, True),  # at most 0.4
        ([1.0, 1.0], 2, {"min_std": 0.45}, False),  # 0.5 with two zeros
        ([1.0], 0, {"max_mean": 0.5}, False),  # nothing is missing: the filters decide
        ([1.0], 3, {}, False),
    ],
)
def test_early_stopping_by_hand(rewards: list[float], missing: int, filters: dict[str, float], doomed: bool) -> None:
    assert cannot_pass_filter(rewards, missing, (0.0, 1.0), **filters) is doomed
