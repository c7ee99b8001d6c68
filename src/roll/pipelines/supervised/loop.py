"""Learning from examples by one loss, in one short loop:

draw examples → learn → evaluate → draw …

Fine-tuning learns to write what the assistant wrote, a reward model to score the preferred answer higher or as its row
says, a student to come near to its teachers; what these said is among the columns of the samples.
"""

from __future__ import annotations

from roll.pipelines.run import take_steps, whole_run
from roll.pipelines.supervised.course import Course
from roll.protocols import LossFn

__all__ = ["train"]


async def train(course: Course, loss: LossFn) -> None:
    """Take the remaining steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """

    async def step() -> list[str]:
        drawn = await course.draw()
        result = await course.learn(drawn, loss)
        alarms = course.cross_boundary(drawn, result)
        await course.evaluate_if_due(loss)
        return alarms

    async with whole_run(course.run):
        await course.evaluate_if_due(loss)
        await take_steps(course.run, step)
