"""The rule for the engines' width, on loads whose outcome follows from the rule's text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from roll.rollout.width_rule import StepLoad, WidthCapacity, WidthState, fits

UNKNOWN: dict[int, WidthCapacity] = {}


def load(num_preempted: int, *, context: float = 1000.0, requests: int = 64) -> StepLoad:
    return StepLoad(num_preempted=num_preempted, mean_context=context, num_requests=requests)


def follow(preempted: Sequence[int], widths: Sequence[int] = (1, 2, 4)) -> list[int]:
    """The width after every step."""
    state, found = WidthState(width=widths[0]), []
    for count in preempted:
        state = state.record_step(load(count), widths, UNKNOWN)
        found.append(state.width)
    return found


@pytest.mark.parametrize(
    ("preempted", "widths"),
    [
        ([100, 105, 106], [1, 1, 1]),  # 105 = 1.05 x 100, and 106 < 1.05 x 105
        ([100, 106], [1, 2]),
        ([0, 1], [1, 2]),
        ([7], [1]),  # there is no previous step
        ([1, 2, 4, 8, 16], [1, 2, 4, 4, 4]),  # the largest width stays
        ([0, 1, 0, 0, 0, 0], [1, 2, 2, 2, 2, 1]),
        ([0, 1, 0, 0, 0, 1, 0, 0, 0, 0], [1, 2, 2, 2, 2, 4, 4, 4, 4, 2]),
        ([0, 1, 2, *[0] * 8], [1, 2, 4, 4, 4, 4, 2, 2, 2, 2, 1]),  # four clean steps for each
        ([0] * 12, [1] * 12),
    ],
)
def test_width_rule_follows_preemptions(preempted: list[int], widths: list[int]) -> None:
    assert follow(preempted) == widths


def test_width_rule_widens_when_contexts_of_the_mean_length_do_not_fit_although_none_was_preempted() -> None:
    """64 requests of 1,000 tokens need 64,000; the wide engines have room for more."""
    capacities = {
        1: WidthCapacity(num_slots=64, kv_tokens=63_999),
        2: WidthCapacity(num_slots=64, kv_tokens=100_000),
    }
    state = WidthState(width=1).record_step(load(0), [1, 2], capacities)
    assert state.width == 2
    for _ in range(10):  # and stays there, however clean
        state = state.record_step(load(0), [1, 2], capacities)
    assert state.width == 2
    shorter = load(0, context=999.0)  # 63,936 tokens
    assert state.record_step(shorter, [1, 2], capacities).width == 1


def test_width_rule_says_why_the_width_changes() -> None:
    capacities = {1: WidthCapacity(num_slots=16, kv_tokens=20_000), 2: WidthCapacity(num_slots=16, kv_tokens=44_000)}
    state = WidthState(width=1).record_step(load(1_000), [1, 2], capacities)
    assert (state.width, state.reason) == (1, "")
    wider = state.record_step(load(1_051), [1, 2], capacities)
    assert (wider.width, wider.reason) == (2, "a step had 1,051 preemptions, the previous one 1,000")
    wider = state.record_step(load(0, context=1250.4), [1, 2], capacities)  # 16 x 1,250.4 = 20,006
    assert wider.reason == "16 requests of 1,250 tokens on average do not fit into KV caches of 20,000 tokens"
    for _ in range(4):
        assert wider.width == 2
        wider = wider.record_step(load(0), [1, 2], capacities)
    assert (wider.width, wider.reason) == (1, "4 consecutive steps had no preemption")


def test_width_rule_counts_only_requests_that_have_a_slot() -> None:
    few = WidthCapacity(num_slots=8, kv_tokens=8_000)
    assert fits(load(0), few)
    assert not fits(load(0, context=1001.0), few)
    assert fits(load(0), WidthCapacity(num_slots=64, kv_tokens=None))
    assert fits(load(0), None)
