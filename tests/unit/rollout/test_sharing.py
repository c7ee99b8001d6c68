"""When engines release devices that they share with trainers, and when they generate on them again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.sharing import find_sharing_problem
from roll.rollout.pace import PaceCurve
from roll.rollout.sharing import (
    GenerationLoad,
    OverlapState,
    RoundProgress,
    StreamStart,
    compute_overlap_start,
    predict_saved_s,
)


def test_sharing_ratio_rises_after_two_steps_that_waited_and_falls_after_two_that_did_not() -> None:
    state = OverlapState()
    ratios = []
    for wait_s in (10.0, 10.0, 0.0, 0.0, 10.0, 0.0, 10.0, 10.0):
        state = state.record_step(wait_s=wait_s, step_s=100.0)
        ratios.append(state.ratio)
    # 0.4 + 0.05 after two waits, - 0.03 after two steps without; a change of direction begins a new pair.
    assert ratios == pytest.approx([0.4, 0.45, 0.45, 0.42, 0.42, 0.42, 0.42, 0.47])


def test_sharing_ratio_ignores_waits_of_less_than_two_percent_of_a_step() -> None:
    state = OverlapState()
    for _ in range(2):
        state = state.record_step(wait_s=1.9, step_s=100.0)
    assert state.ratio == pytest.approx(0.37)


@given(st.lists(st.booleans(), max_size=200))
def test_sharing_ratio_stays_between_0_and_1(waits: list[bool]) -> None:
    state = OverlapState()
    for waited in waits:
        state = state.record_step(wait_s=float(waited), step_s=1.0)
        assert 0.0 <= state.ratio <= 1.0


@pytest.mark.parametrize(
    ("ratio", "batch_size", "min_groups", "start"),
    [(0.4, 128, 16, 52), (0.05, 128, 16, 16), (1.0, 128, 16, 128), (0.4, 8, 8, 8), (0.4, 1, 1, 1)],
)
def test_sharing_overlap_starts_between_the_first_part_and_the_whole_batch(
    ratio: float, batch_size: int, min_groups: int, start: int
) -> None:
    assert compute_overlap_start(ratio, batch_size, min_groups) == start


def build_load(
    num_requests: int, *, engine_share: float = 1.0, slots: int = 20, curve: PaceCurve | None = None
) -> GenerationLoad:
    return GenerationLoad(num_requests=num_requests, engine_share=engine_share, num_slots=slots, curve=curve)


def test_sharing_saved_wait_is_the_difference_of_two_waits() -> None:
    # If the time per token grows in proportion to the requests, 4 engines need 30 s, and 4 + 8 engines need 10 s.
    load = build_load(60)
    assert predict_saved_s(30.0, 4, 4, 8, load) == pytest.approx(20.0)
    assert predict_saved_s(0.0, 4, 4, 8, load) == 0.0
    assert predict_saved_s(30.0, 4, 0, 8, load) == math.inf  # without the shared engines, no group would finish
    assert predict_saved_s(math.inf, 0, 4, 8, load) == math.inf  # nothing has been measured yet
    # If 12 engines need 30 s, 4 engines need 90 s.
    assert predict_saved_s(30.0, 12, 4, 8, load) == pytest.approx(60.0)


def test_sharing_further_engines_save_nothing_if_tokens_take_as_long_with_fewer_requests() -> None:
    load = build_load(60, curve=PaceCurve(0.01, 0.0))
    assert predict_saved_s(30.0, 4, 4, 8, load) == pytest.approx(0.0)


def test_sharing_saved_wait_follows_the_time_per_token() -> None:
    # 80 requests fill the 4 x 20 slots of the kept engines: 1 + 1 per token. On 12 engines, a third is in use: 1 + 1/3.
    load = build_load(80, curve=PaceCurve(1.0, 1.0))
    assert predict_saved_s(30.0, 4, 4, 8, load) == pytest.approx(30.0 * (1 - (4 / 3) / 2))
    # If 12 engines need 30 s, 4 engines need 45 s.
    assert predict_saved_s(30.0, 12, 4, 8, load) == pytest.approx(15.0)


def test_sharing_saved_wait_includes_the_queue() -> None:
    # 160 requests, 80 slots: a request waits as long as it runs, 2 x (1 + 1). On 12 engines, all run: 1 + 160 / 240.
    load = build_load(160, curve=PaceCurve(1.0, 1.0))
    assert predict_saved_s(30.0, 4, 4, 8, load) == pytest.approx(30.0 * (1 - (5 / 3) / 4))
    # Without a slope, 320 requests need four rounds on 4 engines, and 4/3 on 12: three times as fast.
    load = build_load(320, curve=PaceCurve(1.0, 0.0))
    assert predict_saved_s(30.0, 4, 4, 8, load) == pytest.approx(20.0)


def test_sharing_saved_wait_excludes_the_time_of_environments() -> None:
    # A rollout waits for its environment half of the time. In the other half, a token takes 4/3 instead of 2.
    load = build_load(80, engine_share=0.5, curve=PaceCurve(1.0, 1.0))
    assert predict_saved_s(30.0, 4, 4, 8, load) == pytest.approx(30.0 * 0.5 * (1 - (4 / 3) / 2))
    assert predict_saved_s(30.0, 4, 4, 8, build_load(0, engine_share=0.0)) == 0.0


def test_sharing_wait_is_that_for_missing_groups_or_for_the_longest_answer() -> None:
    state = OverlapState().record_generation(60, 30.0, 120.0)
    for span_s in (1000.0, 90.0, 100.0, 110.0):  # only the last three count
        state = state.record_span(span_s)
    assert state.predict_wait_s(40, None) == pytest.approx(20.0)  # 2 groups per second
    assert state.predict_wait_s(40, 30.0) == pytest.approx(70.0)  # batches took 100 s from their first start
    assert state.predict_wait_s(40, 95.0) == pytest.approx(20.0)
    assert state.predict_wait_s(0, 30.0) == pytest.approx(70.0)
    assert state.predict_wait_s(0, 200.0) == 0.0
    assert state.predict_wait_s(0, None) == 0.0
    assert OverlapState().predict_wait_s(40, None) == math.inf


def test_sharing_wait_counts_only_until_the_devices_are_released_again() -> None:
    state = OverlapState().record_generation(60, 30.0, 120.0).record_span(100.0)
    assert state.predict_wait_s(40, 30.0, 10) == pytest.approx(5.0)  # 2 groups per second
    assert state.predict_wait_s(40, 30.0, 0) == state.predict_wait_s(40, 30.0, -5) == 0.0
    assert state.predict_wait_s(40, 30.0, 1000) == pytest.approx(70.0)


def test_sharing_engines_generate_only_if_that_saves_more_than_the_mean_of_the_last_three_switches() -> None:
    state = OverlapState()
    for seconds in (100.0, 3.0, 4.0, 5.0):
        state = state.record_switch(seconds)
    assert state.switches_s == (3.0, 4.0, 5.0)
    assert not state.should_generate(4.0, 1.0)
    assert state.should_generate(4.1, 10.0)


def test_sharing_before_the_first_switch_back_the_switch_to_training_is_the_limit() -> None:
    assert not OverlapState().should_generate(2.0, 2.0)
    assert OverlapState().should_generate(2.1, 2.0)
    assert OverlapState().should_generate(math.inf, 2.0)  # nothing has been measured yet


def test_sharing_rate_is_that_of_the_last_three_steps() -> None:
    state = OverlapState()
    assert (state.groups_per_s, state.mean_engines) == (0.0, 0.0)
    for groups, seconds, engine_s in ((1000, 1.0, 1.0), (10, 5.0, 20.0), (20, 5.0, 20.0), (30, 10.0, 20.0)):
        state = state.record_generation(groups, seconds, engine_s)
    assert state.groups_per_s == pytest.approx(3.0)
    assert state.mean_engines == pytest.approx(3.0)


def progress(done: int, *prompts: int) -> RoundProgress:
    return RoundProgress(num_done=done, unfinished_prompts=prompts)


def test_sharing_stream_starts_when_the_requests_fit_into_the_remaining_engines() -> None:
    start = StreamStart()
    assert not start.is_due(progress(5, *[10] * 5), 10_000)  # no lengths are known in the first round
    start.end_round([100] * 9 + [1000])
    assert not start.is_due(progress(1, *[10] * 9), 10_000)  # less than 20 % have finished
    # The 90 % quantile is 100 tokens: 8 requests need 8 x 110 tokens, 7 requests 770.
    assert not start.is_due(progress(2, *[10] * 8), 800)
    assert not start.is_due(progress(2, *[10] * 8), 10_000)  # checked once at 20 %
    assert start.is_due(progress(3, *[10] * 7), 800)


def test_sharing_stream_start_checks_every_round_again_and_needs_a_known_capacity() -> None:
    start = StreamStart()
    start.end_round([10])
    assert start.is_due(progress(5, *[10] * 5), 1000)
    assert not start.is_due(progress(96, *[10] * 4), 10)  # 95 % is the last check of a round
    assert not start.is_due(progress(97, *[10] * 3), 1000)
    start.end_round([10])
    assert not start.is_due(progress(5, *[10] * 5), None)
    start.end_round([10])
    assert start.is_due(progress(5, *[10] * 5), 1000)


@pytest.mark.parametrize(
    ("rule", "async_ratio", "num_shared", "problem"),
    [
        ("disaggregated", 0, 0, ""),
        ("colocated", 0, 4, ""),
        ("colocated", 1, 4, ""),
        ("partial_overlap", 1, 2, ""),
        ("elastic_overlap", 1, 2, ""),
        ("stream_training", 0, 2, ""),
        ("partial_overlap", 0, 2, "set sharing to stream_training"),
        ("elastic_overlap", 0, 2, "set sharing to stream_training"),
        ("stream_training", 1, 2, "set sharing to elastic_overlap"),
        ("partial_overlap", 1, 4, "every engine shares devices"),
        ("stream_training", 0, 4, "set sharing to colocated"),
    ],
)
def test_sharing_rules_that_do_not_fit_the_run_name_the_alternative(
    rule: str, async_ratio: float, num_shared: int, problem: str
) -> None:
    found = find_sharing_problem(
        rule,  # type: ignore[arg-type]
        async_ratio=async_ratio,
        num_engines=4,
        num_shared=num_shared,
    )
    assert problem in found and bool(found) == bool(problem)
    assert not found or f"cluster.sharing {rule}" in found
