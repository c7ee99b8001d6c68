"""The one loop of all pipelines that learn from rollouts:

    collect ─► learn ─► weight sync ─► boundary: every draw has its fate ─► evaluate ─► collect …

    at an async ratio of 0     one thing after the other: every batch comes from the newest policy
    above 0                    engines generate meanwhile, at most ⌈α⌉ policy versions behind, and answer evaluations

What is learned from a batch, and how, is the pipeline's objective. Work up to the first update may be thrown away at
any moment (a signal, a crash): it changes nothing that lasts. What follows runs to the step's boundary, where the run
can be saved.

The loop knows run, trainer and engines as protocols, and asks asyncio alone for the time.
"""

from __future__ import annotations

from typing import TypeVar

from roll.pipelines.online.protocols import Collected, Objective, StepRun, Update

__all__ = ["train"]

T = TypeVar("T")


async def train(online: StepRun, objective: Objective[T]) -> None:
    """Take the remaining steps.

    Args:
        online: the run, at a step's boundary.
        objective: what is learned from each batch.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    live = online.live

    async def collect() -> Collected[T]:
        return await objective.collect(await online.next_batch())

    async def learn(collected: Collected[T]) -> Update:
        if not collected.rollouts:
            return Update()
        async with live.learning():
            update = await objective.learn(collected)
            if not update.stepped:
                return update
            online.count_update()
            metrics = {**update.metrics, **await live.push()}
        return Update(metrics=metrics, stepped=True, advantages=update.advantages, tokens=update.tokens)

    async def step() -> list[str]:
        await live.wake()
        collected = await online.unless_stopped(collect())
        update = await learn(collected)
        alarms = await online.finish_step(collected, update, lambda: objective.note(collected))
        await online.evaluate()
        return alarms

    async with online.running():
        await online.evaluate()
        await online.take_steps(step)
