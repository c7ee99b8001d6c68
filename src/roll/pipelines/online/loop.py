"""The loop of all pipelines that learn from rollouts:

    collect ─► learn ─► weight sync ─► boundary: every draw has its outcome ─► evaluate ─► collect …

    at an async ratio of 0     sequential: every batch comes from the newest policy
    above 0 engines generate during training, at most ⌈α⌉ policy versions behind, and answer evaluations

The pipeline's objective defines how to train on a batch. Work before the first update changes no persistent state, so
it may be discarded at any time (by a signal or a crash). The rest of a step runs to its boundary, where it can be
saved.

The loop uses run, trainer and engines only through protocols, and reads the time only from asyncio.
"""

from __future__ import annotations

from typing import TypeVar

from roll.pipelines.online.protocols import CollectedBatch, Objective, StepRun, UpdateOutcome

__all__ = ["train"]

T = TypeVar("T")


async def train(online: StepRun, objective: Objective[T]) -> None:
    """Run the remaining steps.

    Args:
        online: The run, at a step's boundary.
        objective: The objective of each batch.

    Raises:
        AlarmError: An alarm stops the run. The state at this step's boundary is saved.
        Interrupted: A signal requested a stop. The state at the last step's boundary is saved.
    """
    policy_engines = online.policy_engines

    async def collect() -> CollectedBatch[T]:
        return await objective.collect(await online.next_batch())

    async def learn(collected: CollectedBatch[T]) -> UpdateOutcome:
        if not collected.rollouts:
            return UpdateOutcome()
        async with policy_engines.enter_training():
            update = await objective.learn(collected)
            if not update.has_new_weights:
                return update
            online.advance_policy_version()
            metrics = {**update.metrics, **await policy_engines.push()}
        return UpdateOutcome(metrics=metrics, has_new_weights=True, advantages=update.advantages, tokens=update.tokens)

    async def step() -> list[str]:
        await policy_engines.wake()
        collected = await online.run_unless_stopped(collect())
        update = await learn(collected)
        alarms = await online.finish_step(collected, update, lambda: objective.update_state(collected))
        await online.evaluate()
        return alarms

    async with online.open_session():
        await online.evaluate()
        await online.run_steps(step)
