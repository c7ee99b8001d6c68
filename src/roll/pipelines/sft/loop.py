"""Supervised fine-tuning in one short loop:

draw examples → learn to write what the assistant wrote → evaluate → draw …
"""

from __future__ import annotations

from roll.algorithms.losses import LikelihoodLoss
from roll.pipelines.run import take_steps, whole_run
from roll.pipelines.supervised.course import Course

__all__ = ["train"]

LOSS = LikelihoodLoss()


async def train(course: Course) -> None:
    """Take the remaining steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """

    async def step() -> list[str]:
        drawn = await course.draw()
        result = await course.learn(drawn, LOSS)
        alarms = course.cross_boundary(drawn, result)
        await course.evaluate_if_due(LOSS)
        return alarms

    async with whole_run(course.run):
        await course.evaluate_if_due(LOSS)
        await take_steps(course.run, step)
