"""When an engine counts as hung: by its own pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.hang_detector import CHECK_INTERVAL_S, FIRST_STEP_TIMEOUT_S, MIN_TIMEOUT_S, HangDetector


def seen(*gaps: float) -> HangDetector:
    """After steps that took so long."""
    pace, now = HangDetector(0.0), 0.0
    for number, gap in enumerate(gaps, 1):
        now += gap
        pace.observe(now, number)
    return pace


@pytest.mark.parametrize(
    ("gaps", "patience"),
    [
        ((), 600.0),  # none yet: kernels may be compiled
        ((1.0,), 120.0),
        ((10.0,), 120.0),
        ((10.0, 20.0, 10.0), 240.0),  # 12 x 20
        ((100.0,), 600.0),
        ((300.0,), 900.0),  # 3 x 300
    ],
)
def test_hung_engine_patience_follows_the_slowest_step(gaps: tuple[float, ...], patience: float) -> None:
    assert seen(*gaps).timeout_s == patience


def test_hung_engine_a_slow_step_is_forgotten_after_many_fast_ones() -> None:
    assert seen(100.0, *[10.0] * 255).timeout_s == 600.0
    assert seen(100.0, *[10.0] * 256).timeout_s == 120.0


def test_hung_engine_a_look_that_comes_late_grants_the_delay() -> None:
    pace = seen(10.0)
    assert pace.observe(131.0, 1)
    pace = seen(10.0)
    assert not pace.observe(1000.0, 1, delay_s=900.0)  # the loop that looks stood still itself
    assert pace.observe(1131.0, 1)


def test_hung_engine_what_had_nothing_to_do_does_not_hang() -> None:
    pace = seen(10.0)
    pace.restart_timeout(5000.0)
    assert not pace.observe(5100.0, 1)


@given(st.lists(st.floats(CHECK_INTERVAL_S, 2000.0), min_size=1, max_size=50))
def test_hung_engine_no_engine_hangs_that_slows_down_no_more_than_threefold(gaps: list[float]) -> None:
    pace, now, slowest = HangDetector(0.0), 0.0, FIRST_STEP_TIMEOUT_S / 3
    for number, gap in enumerate(gaps, 1):
        gap = min(gap, 3 * slowest)
        now += gap - 0.001
        assert not pace.observe(now, number - 1)
        now += 0.001
        assert not pace.observe(now, number)
        slowest = max(pace.slowest_s, MIN_TIMEOUT_S / 3)
