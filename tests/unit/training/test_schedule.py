"""Learning rates, by hand."""

from __future__ import annotations

import math

import pytest

from roll.config.training import TrainingConfig
from roll.training.schedule import learning_rate


def rates(**settings: object) -> list[float]:
    config = TrainingConfig(num_steps=6, learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, config) for step in range(7)]


def test_constant_after_warm_up() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_linear_would_reach_zero_at_the_end_and_stays_there() -> None:
    assert rates(schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_cosine() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(7)]
    assert rates(schedule="cosine") == pytest.approx(expected)
    assert rates(schedule="cosine")[3] == pytest.approx(0.5)


def test_warm_up_as_long_as_the_run() -> None:
    assert rates(schedule="linear", warmup_steps=6)[:6] == pytest.approx([n / 6 for n in range(1, 7)])
