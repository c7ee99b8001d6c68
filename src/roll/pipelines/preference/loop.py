"""Learning from preferences in one short loop:

draw examples → what the reference says of them → prefer what was preferred → evaluate → draw …
"""

from __future__ import annotations

from roll.pipelines.preference.objective import Objective
from roll.pipelines.run import take_steps, whole_run
from roll.pipelines.supervised.course import Course

__all__ = ["train"]


async def train(course: Course, objective: Objective) -> None:
    """Take the remaining steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """

    async def step() -> list[str]:
        drawn = await course.draw()
        result = await course.learn(drawn, objective.loss)
        alarms = course.cross_boundary(drawn, result)
        await course.evaluate_if_due(objective.loss)
        return alarms

    async with whole_run(course.run):
        await course.evaluate_if_due(objective.loss)
        await take_steps(course.run, step)
