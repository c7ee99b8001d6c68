"""Learning rates, by hand."""

from __future__ import annotations

import math

import pytest

from roll.config.training import TrainingConfig
from roll.training.schedule import Schedule


def rates(**settings: object) -> list[float]:
    config = TrainingConfig(num_steps=6, learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [Schedule.from_config(config).compute_learning_rate(step) for step in range(7)]


def test_learning_rate_schedule_constant_after_warm_up() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_learning_rate_schedule_linear_would_reach_zero_at_the_end_and_stays_there() -> None:
    assert rates(schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_learning_rate_schedule_cosine() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(7)]
    assert rates(schedule="cosine") == pytest.approx(expected)
    assert rates(schedule="cosine")[3] == pytest.approx(0.5)


def test_learning_rate_schedule_warm_up_as_long_as_the_run() -> None:
    assert rates(schedule="linear", warmup_steps=6)[:6] == pytest.approx([n / 6 for n in range(1, 7)])


def test_learning_rate_schedule_several_updates_a_step_stretch_warm_up_and_decay() -> None:
    config = TrainingConfig(num_steps=3, learning_rate=1.0, warmup_steps=1, schedule="linear")
    schedule = Schedule.from_config(config, updates_per_step=2)
    assert [schedule.compute_learning_rate(update) for update in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_learning_rate_schedule_steps_in_which_critics_warm_up_alone_are_not_the_policys() -> None:
    config = TrainingConfig(num_steps=5, learning_rate=1.0, schedule="linear")
    schedule = Schedule.from_config(config, updates_per_step=2, idle_steps=3)
    assert [schedule.compute_learning_rate(update) for update in range(5)] == [1, 0.75, 0.5, 0.25, 0]


def test_learning_rate_schedule_a_critic_has_its_own_peak() -> None:
    config = TrainingConfig(num_steps=4, learning_rate=1.0, warmup_steps=2)
    assert [
        Schedule.from_config(config, peak_learning_rate=3.0).compute_learning_rate(update) for update in range(3)
    ] == [1.5, 3, 3]


def test_learning_rate_schedule_a_run_that_never_updates_the_policy_has_a_rate_still() -> None:
    config = TrainingConfig(num_steps=2, learning_rate=1.0, schedule="cosine")
    assert Schedule.from_config(config, idle_steps=5).compute_learning_rate(0) == 1.0
