"""Reinforcement learning from rewards, in two short loops:

    synchronous      generate → reward → filter → advantages → train → sync → evaluate → generate …

    asynchronous     train ───────────► sync ► train ───────────► sync ► …
                     generate, reward ──────────────────────────────────►     (at most ⌈α⌉ policy versions behind)
                     evaluate ────────►       evaluate ──────────►

Work up to `learn_from` may be thrown away at any moment (a signal, a crash): it changes nothing that lasts. What
follows runs to the step's boundary, where the run can be saved.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from roll.pipelines.evaluation import Evaluator
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.online.boundary import evaluate_if_due, running
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.rlvr.collecting import Collected, collect
from roll.pipelines.rlvr.step import learn_from
from roll.pipelines.run import take_steps

__all__ = ["train", "train_asynchronously", "train_synchronously"]


Learn: TypeAlias = Callable[[OnlineRun[Any], Collected], Awaitable[list[str]]]
"""From a collected batch to a step's boundary; returns alarms that stop the run."""


async def train(online: OnlineRun[Any], live: LivePolicy, evaluator: Evaluator, learn: Learn = learn_from) -> None:
    """Take the remaining steps.

    Args:
        online: the run.
        live: the engines that follow its policy.
        evaluator: measures it.
        learn: what is done with each batch.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    rollout = online.config.rollout
    loop = train_asynchronously if rollout.scheduling.async_ratio > 0 else train_synchronously
    async with running(online.run, live, rollout.stall_s):
        await loop(online, live, evaluator, learn)


async def train_synchronously(
    online: OnlineRun[Any], live: LivePolicy, evaluator: Evaluator, learn: Learn = learn_from
) -> None:
    """One thing after the other: every batch comes from the newest policy."""

    async def step() -> list[str]:
        await live.wake(online.run)
        collected = await online.run.stop.unless(collect(online, live))
        alarms = await learn(online, collected)
        await evaluate_if_due(online, evaluator)
        return alarms

    await evaluate_if_due(online, evaluator)
    await take_steps(online.run, step)


async def train_asynchronously(
    online: OnlineRun[Any], live: LivePolicy, evaluator: Evaluator, learn: Learn = learn_from
) -> None:
    """Generation, training and evaluation side by side; engines stand still only while they get new weights."""
    run = online.run

    async def step() -> list[str]:
        collected = await run.stop.unless(collect(online, live))
        alarms = await learn(online, collected)
        if live.evaluation is not None and live.evaluation.done():
            live.evaluation.result()  # of one that failed; here, all that was learnt can be saved
        evaluator.begin_if_due()
        if run.checkpoint.keep_best or run.state.step == run.num_steps:
            await run.stop.unless(live.evaluated())
        return alarms

    evaluator.begin_if_due()
    await take_steps(run, step)
