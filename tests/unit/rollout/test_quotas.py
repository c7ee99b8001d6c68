"""Exact shares of domains: as they are dealt, and through whole schedules in which groups expire."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.training import Settings, play

from roll.config.scheduling import SchedulingConfig
from roll.rollout.quotas import Quotas

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1)


@given(WEIGHTS, st.lists(st.integers(0, 7), max_size=12))
def test_rollout_quota_every_total_is_within_a_place_per_domain_of_its_share(
    weights: dict[str, float], steps: list[int]
) -> None:
    quotas, dealt = Quotas(weights), Counter[str]()
    for places in steps:
        ahead = quotas.peek(places)
        assert quotas.allocate(places) == ahead
        dealt += ahead
        for domain, weight in weights.items():
            share = weight / sum(weights.values()) * dealt.total()
            assert abs(dealt[domain] - share) < len(weights)


@given(WEIGHTS, st.integers(0, 30), st.integers(0, 30))
def test_rollout_quota_a_resumed_run_deals_on_where_it_stopped(
    weights: dict[str, float], before: int, after: int
) -> None:
    whole = Quotas(weights)
    whole.allocate(before)
    assert Quotas(weights, before).allocate_in_order(after) == whole.allocate_in_order(after)


def test_rollout_quota_a_place_that_was_not_used_is_dealt_again() -> None:
    quotas = Quotas({"a": 1.0, "b": 1.0})
    assert quotas.allocate_in_order(4) == ["a", "b", "a", "b"]
    quotas.return_slot("b")
    assert quotas.allocate_in_order(3) == ["b", "a", "b"]


@pytest.mark.parametrize("seed", range(2))
def test_rollout_quota_the_mix_holds_although_groups_that_got_too_old_are_given_up(seed: int) -> None:
    scheduling = SchedulingConfig(async_ratio=1.0, stale_policy="drop", domain_quotas=True)
    settings = Settings(seed=seed, scheduling=scheduling, batch_size=4, num_steps=8, num_engines=1, capacity=6)
    world = play(settings)  # which checks the mix over the whole run
    assert sum(len(batch.expired) for batch in world.batches) > 0
