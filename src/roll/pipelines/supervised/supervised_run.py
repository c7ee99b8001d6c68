"""The parts of a training step on examples: drawing, the update, the step's boundary, evaluation.

stream ─ draw ─► samples ─► batch ─ columns ─► update ─► boundary: every draw has its outcome, the run may be saved

Drawing changes no persistent state, so a signal can interrupt it; an update runs to the boundary.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from roll.config.supervised import SupervisedConfig, SupervisedTrainingConfig
from roll.data.examples import ExampleData
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.learner import update
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.measures import compute_training_metrics
from roll.pipelines.run import Run
from roll.pipelines.supervised.evaluation import compute_held_out_metrics, merge_metrics
from roll.pipelines.supervised.preparation import build_held_out_batch
from roll.protocols import LossFn, TrainerGroup
from roll.types import DrawOutcome, ExampleDraw, Group, StepResult, TrainingBatch, TrainingSample

__all__ = ["ExampleBatch", "LossBuilder", "SupervisedRun", "draw_next_examples", "render_draws"]

logger = logging.getLogger(__name__)


LossBuilder: TypeAlias = Callable[[Sequence[TrainingSample]], Awaitable[LossFn]]
"""Coroutine function that returns the loss of a batch, if it depends on the batch and on the current weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleBatch:
    """The draws and samples of a step."""

    draws: Sequence[ExampleDraw]
    samples: tuple[TrainingSample, ...]
    left_out: dict[int, str] = field(default_factory=dict)
    """Reasons why examples cannot be trained on, by draw ID."""


def draw_next_examples(examples: ExampleData, training: SupervisedTrainingConfig) -> list[ExampleDraw]:
    """Return the draws of the next step. At the end of the last epoch, there may be fewer than a full batch."""
    stream, most, count = (
        examples.train,
        training.compute_max_draws(examples.train.num_items),
        training.examples_per_step,
    )
    return stream.draw(count if most is None else min(count, most - stream.num_drawn))


def render_draws(draws: Sequence[ExampleDraw], examples: ExampleData) -> ExampleBatch:
    """Render draws to samples; draws that cannot be rendered are returned separately."""
    samples: list[TrainingSample] = []
    left_out: dict[int, str] = {}
    for draw in draws:
        found = examples.build_samples(draw)
        if isinstance(found, str):
            left_out[draw.draw_id] = found
        else:
            samples += found
    return ExampleBatch(draws=draws, samples=tuple(samples), left_out=left_out)


async def _build_loss(loss: LossFn | LossBuilder, samples: Sequence[TrainingSample]) -> LossFn:
    return await cast(LossBuilder, loss)(samples) if inspect.iscoroutinefunction(loss) else cast(LossFn, loss)


async def _add_no_columns(batch: TrainingBatch) -> TrainingBatch:
    return batch


@dataclass(kw_only=True, slots=True)
class SupervisedRun:
    """A run that trains on examples."""

    config: SupervisedConfig
    training: SupervisedTrainingConfig
    """Training configuration with the run's number of steps."""
    run: Run
    policy: TrainerGroup
    """The trained model."""
    examples: ExampleData
    add_columns: Callable[[TrainingBatch], Awaitable[TrainingBatch]] = _add_no_columns
    """Adds the columns that the loss needs in addition to the examples'."""
    answers: Evaluator | None = None
    """Evaluator of engines' answers, used whenever the held-out loss is measured."""
    _held_out: TrainingBatch | None = None

    async def draw(self) -> ExampleBatch:
        """Draw the examples of the next step. At the end of the last epoch, there may be fewer than a full batch."""
        return await self.run.stop.run_unless_stopped(asyncio.to_thread(self._draw))

    def _draw(self) -> ExampleBatch:
        return render_draws(draw_next_examples(self.examples, self.training), self.examples)

    async def learn(self, example_batch: ExampleBatch, loss: LossFn | LossBuilder) -> StepResult | None:
        """Run one optimizer step; return `None` if no drawn example can be trained on."""
        self.run.ledger.record_draws(example_batch.draws, self.run.state.step + 1)
        if not example_batch.samples:
            return None
        async with self.answers.policy_engines.enter_training() if self.answers else nullcontext():
            batch = await self.add_columns(TrainingBatch(samples=example_batch.samples))
            with self.run.spans.phase("train"):
                return await update(self.run, self.policy, batch, await _build_loss(loss, batch.samples))

    def finish_step(self, example_batch: ExampleBatch, result: StepResult | None) -> list[str]:
        """Finish the step: record every draw's outcome, log metrics, and return the alarms that stop the run."""
        run, state = self.run, self.run.state
        run.mid_update = True
        state.step += 1
        for draw in example_batch.draws:
            why = example_batch.left_out.get(draw.draw_id)
            run.ledger.record_outcome(
                draw.draw_id, DrawOutcome.FILTERED if why else DrawOutcome.TRAINED, state.step, why or ""
            )
        state.policy_version += bool(result and result.stepped)
        state.data, state.num_draws = self.examples.train.state(), self.examples.train.num_drawn
        run.mid_update = False
        metrics = compute_training_metrics([result] if result else [])
        metrics |= {f"data/{outcome}": float(count) for outcome, count in run.ledger.count_outcomes().items()}
        metrics |= {
            "data/examples_trained": float(len(example_batch.draws) - len(example_batch.left_out)),
            "data/epoch": state.num_draws / self.examples.train.num_items,
        }
        state.alarms, alarms = check_alarms(self.config.alarms, metrics, state.alarms)
        for alarm in alarms:
            logger.warning("%s", alarm.message)
        run.tracker.log_step(state.step, metrics | run.spans.get_metrics())
        return [alarm.message for alarm in alarms if alarm.stops]

    async def evaluate_if_due(self, loss: LossFn | LossBuilder) -> None:
        """Evaluate on the held-out examples if an evaluation is due."""
        run, every = self.run, self.config.evaluation.every_num_steps
        step = run.state.step
        last = step == run.num_steps
        due = self.config.evaluation.before_training if step == 0 else last or bool(every and step % every == 0)
        if due and run.state.evaluated_at != step and self.examples.held_out:
            await self._evaluate(loss)

    async def _evaluate(self, loss: LossFn | LossBuilder) -> None:
        """Measure the loss on the held-out examples, and the engines' answers, if there are engines."""
        run, answers, groups = self.run, self.answers, list[Group]()
        with run.spans.phase("evaluate"):
            if answers is not None:
                await answers.policy_engines.release_devices()
            metrics = await run.stop.run_unless_stopped(self._measure(loss))
            score = metrics.get("eval/accuracy", -metrics["eval/loss"])
        if answers is not None:
            await answers.policy_engines.sync()
            with run.spans.phase("evaluate"):
                figures, groups = await run.stop.run_unless_stopped(answers.measure())
            metrics = merge_metrics(metrics, figures)
            score = figures.get("eval/score", float("nan"))  # never a loss among scores
        run.state.evaluated_at = run.state.step
        run.state.record_score(run.state.step, score)
        run.tracker.log_evaluation(run.state.step, metrics, groups)
        if answers is not None:
            answers.check(groups)

    async def _measure(self, loss: LossFn | LossBuilder) -> dict[str, float]:
        """Compute the loss and its metrics on the held-out examples, under `eval/…`."""
        batch = await self.build_held_out_batch()
        return compute_held_out_metrics(await self.policy.measure(batch, await _build_loss(loss, batch.samples)), batch)

    async def build_held_out_batch(self) -> TrainingBatch:
        """Return the batch of held-out examples, which every evaluation uses."""
        if self._held_out is None:
            self._held_out = await self.add_columns(
                await asyncio.to_thread(build_held_out_batch, self.config, self.examples)
            )
        return self._held_out
