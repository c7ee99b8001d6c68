"""What is saved when a run ends early: the last boundary, as long as trainers still hold it; and the best step."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from roll.config.operations import CheckpointConfig
from roll.errors import PartialUpdateError, WorkerDiedError
from roll.pipelines.learner import update
from roll.pipelines.run import Run, run_session
from roll.pipelines.state import RunState
from roll.pipelines.stop import Interrupted, StopRequest
from roll.types import StepResult


class Checkpointer:
    def __init__(self, failure: Exception | None = None) -> None:
        self.saved: list[int] = []
        self.failure = failure

    async def save(self, state: RunState, ledger: Any) -> str:
        if self.failure is not None:
            raise self.failure
        self.saved.append(state.step)
        return f"step-{state.step}"

    async def publish_pending(self, *, wait: bool) -> None:
        """Nothing is written in the background."""


def parts(
    step: int, began_at: int, *, mid_update: bool = False, failure: Exception | None = None, has_trained: bool = True
) -> Run:
    from roll.tracking import Spans

    return Run(
        seed=0,
        num_steps=9,
        checkpoint=CheckpointConfig(),
        state=RunState(step=step, data={"cursor": step}, num_draws=3 * step),
        stream=SimpleNamespace(restore=lambda state: None),  # type: ignore[arg-type]
        ledger=SimpleNamespace(drop_from=lambda number: None),  # type: ignore[arg-type]
        checkpointer=Checkpointer(failure),  # type: ignore[arg-type]
        tracker=SimpleNamespace(spans=Spans()),  # type: ignore[arg-type]
        stop=StopRequest(),
        began_at=began_at,
        mid_update=mid_update,
        has_trained=has_trained,
    )


async def nothing_runs() -> None:
    pass


async def test_checkpoint_save_an_error_saves_the_last_boundary_where_it_still_stands() -> None:
    for made, saved in (
        (parts(7, 0), [7]),
        (parts(7, 7), []),  # nothing was learnt since the session began
        (parts(7, 0, mid_update=True), []),  # weights have moved on
        (parts(7, 0, has_trained=False), []),  # they are those of the model that the run began with
    ):
        await made.save_after_error(ValueError("boom"), nothing_runs)
        assert made.checkpointer.saved == saved


async def test_checkpoint_save_a_run_that_trained_nothing_saves_nothing_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for has_trained, saved in ((False, []), (True, [7])):
        made = parts(7, 0, has_trained=has_trained)
        async with run_session(made):
            pass
        assert made.checkpointer.saved == saved
        assert ("no training step was completed, so no checkpoint is saved" in caplog.text) is not has_trained
        caplog.clear()


async def test_checkpoint_save_a_run_that_is_interrupted_before_it_trained_saves_nothing() -> None:
    for has_trained, saved in ((False, []), (True, [7])):
        made = parts(7, 0, has_trained=has_trained)
        with pytest.raises(Interrupted):
            async with run_session(made):
                raise Interrupted("SIGTERM")
        assert made.checkpointer.saved == saved


async def test_checkpoint_save_a_save_that_fails_too_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = parts(7, 0, failure=OSError("disk full"))
    await made.save_after_error(ValueError("boom"), nothing_runs)
    assert "could not be saved: OSError: disk full" in caplog.text


@pytest.mark.parametrize(
    ("error", "num_ranks", "before", "after"),
    [
        (ValueError("in the forward pass"), 1, False, False),
        (ValueError("after another update"), 1, True, True),
        (ValueError("of one rank of two"), 2, False, True),
        (PartialUpdateError("while it moved them"), 1, False, True),
        (WorkerDiedError("gone"), 1, False, True),
        (None, 1, False, True),
    ],
)
async def test_checkpoint_save_the_boundary_stands_until_a_weight_may_have_moved(
    error: Exception | None, num_ranks: int, before: bool, after: bool
) -> None:
    async def train_step(batch: Any, loss: Any) -> StepResult:
        if error is not None:
            raise error
        return StepResult(loss=0.0, num_tokens=1, num_loss_tokens=1, stepped=True)

    made = parts(1, 0, mid_update=before, has_trained=False)
    trainer: Any = SimpleNamespace(train_step=train_step, num_ranks=num_ranks)
    try:
        await update(made, trainer, None, None)  # type: ignore[arg-type]
    except Exception as raised:
        assert raised is error
    assert made.mid_update is after
    assert made.has_trained is (error is None)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({0: 0.5, 10: 0.5, 20: 0.4}, 10),  # a tie with the model before training
        ({0: 0.9, 10: 0.2, 20: 0.4}, 20),  # which is no candidate
        ({0: 0.1, 10: 0.4, 20: 0.4}, 10),
        ({0: 0.5}, None),
        ({10: math.nan, 20: -math.inf, 30: -2.0, 40: -3.0}, 30),  # a loss that overflowed
    ],
)
def test_checkpoint_save_the_best_step_is_one_that_training_made(scores: dict[int, float], best: int | None) -> None:
    state = RunState()
    for step, score in scores.items():
        state.record_score(step, score)
    assert state.best_step == best
    json.dumps(state.to_json(), allow_nan=False)
