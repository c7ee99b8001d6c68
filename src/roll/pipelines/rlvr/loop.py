"""Reinforcement learning with verifiable rewards, in two short loops round the same circle:

    synchronous      generate → reward → filter → advantages → train → sync → evaluate → generate …

    asynchronous     train ───────────► sync ► train ───────────► sync ► …
                     generate, reward ──────────────────────────────────►     (at most ⌈α⌉ policy versions behind)
                     evaluate ────────►       evaluate ──────────►

Work up to `learn_from` may be thrown away at any moment (a signal, a crash): it changes nothing that lasts. What
follows runs to the step's boundary, where the run can be saved.
"""

from __future__ import annotations

import asyncio
import logging

from roll.pipelines.evaluation import Evaluator
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.rlvr.circle import Circle
from roll.pipelines.rlvr.collecting import collect
from roll.pipelines.rlvr.step import learn_from, remember_verifiers
from roll.pipelines.run import take_steps, whole_run
from roll.rollout.watchdog import Watchdog

__all__ = ["train", "train_asynchronously", "train_synchronously"]

logger = logging.getLogger(__name__)


async def train(circle: Circle, live: LivePolicy, evaluator: Evaluator) -> None:
    """Take the remaining steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    run, rollout = circle.run, circle.config.rollout
    loop = train_asynchronously if rollout.scheduling.async_ratio > 0 else train_synchronously
    dog = Watchdog(live.generation.scheduler.life, rollout.stall_s, logger.warning, run.spans.under_way)
    watchdog = asyncio.create_task(dog.watch(), name="watchdog")
    try:
        async with whole_run(run, live.close):
            run.tracker.note("bringing the weights to the engines")
            await live.sync(run)
            await loop(circle, live, evaluator)
    finally:
        watchdog.cancel()


async def train_synchronously(circle: Circle, live: LivePolicy, evaluator: Evaluator) -> None:
    """One thing after the other: every batch comes from the newest policy."""

    async def step() -> list[str]:
        await live.wake(circle.run)
        collected = await circle.run.stop.unless(collect(circle, live))
        alarms = await learn_from(circle, collected)
        await evaluate()
        return alarms

    async def evaluate() -> None:
        if await evaluator.evaluate_if_due():
            remember_verifiers(circle)  # nothing else was scored meanwhile: this is still the boundary

    await evaluate()
    await take_steps(circle.run, step)


async def train_asynchronously(circle: Circle, live: LivePolicy, evaluator: Evaluator) -> None:
    """Generation, training and evaluation side by side; engines stand still only while they get new weights."""
    run = circle.run

    async def step() -> list[str]:
        collected = await run.stop.unless(collect(circle, live))
        alarms = await learn_from(circle, collected)
        if live.evaluation is not None and live.evaluation.done():
            live.evaluation.result()  # of one that failed; here, all that was learnt can be saved
        evaluator.begin_if_due()
        if run.checkpoint.keep_best or run.state.step == run.num_steps:
            await run.stop.unless(live.evaluated())
        return alarms

    evaluator.begin_if_due()
    await take_steps(run, step)
