"""Reinforcement learning with verifiable rewards, in two short loops over the same parts:

    synchronous      generate → reward → filter → advantages → train → sync → evaluate → generate …

    asynchronous     train ───────────► sync ► train ───────────► sync ► …
                     generate, reward ──────────────────────────────────►     (at most ⌈α⌉ policy versions behind)
                     evaluate ────────►       evaluate ──────────►

Work up to `update` may be thrown away at any moment (a signal, a crash): it changes nothing that lasts. What follows
runs to the step's boundary, where the run can be saved.
"""

from __future__ import annotations

import asyncio
import logging

from roll.errors import AlarmError
from roll.pipelines import saving, steps
from roll.pipelines.evaluate import evaluate
from roll.pipelines.learning.collecting import collect
from roll.pipelines.parts import Parts
from roll.pipelines.stop import Interrupted
from roll.rollout.watchdog import Watchdog

__all__ = ["run", "run_asynchronous", "run_synchronous"]

logger = logging.getLogger(__name__)


async def run(parts: Parts) -> None:
    """Run the remaining steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    loop = run_asynchronous if parts.config.rollout.scheduling.async_ratio > 0 else run_synchronous
    dog = Watchdog(parts.scheduler.life, parts.config.rollout.stall_s, logger.warning, parts.spans.under_way)
    if not parts.held_out:
        best = ", and keep_best has nothing to go by" if parts.config.checkpoint.keep_best else ""
        logger.warning("no source holds prompts out, so the run is not evaluated%s: set held_out", best)
    watchdog = asyncio.create_task(dog.watch(), name="watchdog")
    try:
        parts.tracker.note("bringing the weights to the engines")
        await steps.sync(parts)
        await loop(parts)
    except Interrupted:
        await parts.controller.close()
        await saving.save_boundary(parts)
        raise
    except AlarmError:
        raise
    except Exception as error:
        await saving.save_before_the_end(parts, error)
        raise
    finally:
        watchdog.cancel()
        if parts.evaluation is not None:
            parts.evaluation.cancel()
        await parts.controller.close()
    if parts.config.checkpoint.at_end:
        await saving.save(parts)


async def run_synchronous(parts: Parts) -> None:
    """One thing after the other: every batch comes from the newest policy."""
    state = parts.state
    await steps.evaluate_if_due(parts)
    while state.step < parts.config.training.num_steps:
        with parts.spans.step(state.step + 1):
            collected = await parts.stop.unless(collect(parts))
            metrics = await steps.update(parts, collected)
            alarms = await steps.cross_boundary(parts, collected, metrics)
            await steps.evaluate_if_due(parts)
            await saving.save_if_due(parts, alarms)


async def run_asynchronous(parts: Parts) -> None:
    """Generation, training and evaluation side by side; engines stand still only while they get new weights."""
    state = parts.state
    _evaluate_beside(parts)
    while state.step < parts.config.training.num_steps:
        with parts.spans.step(state.step + 1):
            collected = await parts.stop.unless(collect(parts))
            metrics = await steps.update(parts, collected)
            alarms = await steps.cross_boundary(parts, collected, metrics)
            if parts.evaluation is not None and parts.evaluation.done():
                parts.evaluation.result()  # of one that failed; here, all that was learnt can be saved
            _evaluate_beside(parts)
            if parts.config.checkpoint.keep_best or state.step == parts.config.training.num_steps:
                await parts.stop.unless(_evaluated(parts))
            await saving.save_if_due(parts, alarms)


def _evaluate_beside(parts: Parts) -> None:
    """Start an evaluation of the policy that engines hold now; the next sync waits for it."""
    if steps.evaluation_due(parts):
        before = parts.evaluation

        async def work() -> None:
            if before is not None:
                await before
            with parts.spans.phase("evaluate"):
                await evaluate(parts)

        parts.evaluation = asyncio.create_task(work(), name="evaluate")


async def _evaluated(parts: Parts) -> None:
    if parts.evaluation is not None:
        await parts.evaluation
