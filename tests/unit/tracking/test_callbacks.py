"""What a script hears of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.callbacks import Callbacks
from roll.errors import CallbackError, ConfigError, RollError


def test_callbacks_each_callback_hears_its_step_and_a_copy_of_the_metrics():
    heard, metrics = [], {"reward/mean": 0.5}
    callbacks = Callbacks(
        on_step=lambda step, given: (heard.append((step, dict(given))), given.clear()),
        on_evaluation=lambda step, given: heard.append(("evaluation", step)),
        on_save=lambda step, path: heard.append((step, path)),
    )
    callbacks.notify_step(3, metrics)
    callbacks.notify_evaluation(3, metrics)
    callbacks.notify_saved(3, Path("x"))
    assert heard == [(3, {"reward/mean": 0.5}), ("evaluation", 3), (3, Path("x"))]
    assert metrics == {"reward/mean": 0.5}, "what is recorded is not the callback's to change"


def test_callbacks_without_callbacks_nothing_happens():
    Callbacks().notify_step(1, {})
    Callbacks().notify_saved(1, Path("x"))


def test_callbacks_a_failing_callback_is_named():
    def on_save(step, path):
        return 1 / 0

    with pytest.raises(
        CallbackError, match=r"on_save \(.*on_save, .*test_callbacks\.py:\d+\) failed at step 2: ZeroDivis"
    ):
        Callbacks(on_save=on_save).notify_saved(2, Path("x"))
    assert issubclass(CallbackError, RollError)


def test_callbacks_an_interrupt_inside_a_callback_is_its_failure_so_that_the_run_is_saved():
    def on_step(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(CallbackError, match=r"on_step .* failed at step 2: KeyboardInterrupt") as caught:
        Callbacks(on_step=on_step).notify_step(2, {})
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_callbacks_what_cannot_be_called_between_steps_is_refused_at_once():
    async def on_step(step, metrics): ...

    with pytest.raises(ConfigError, match="on_step must be an ordinary function, got a coroutine function"):
        Callbacks(on_step=on_step)
    with pytest.raises(ConfigError, match="on_evaluation must be a function,"):
        Callbacks(on_evaluation=3)
