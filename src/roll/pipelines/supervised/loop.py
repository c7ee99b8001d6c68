"""Learning from examples, in one short loop:

draw examples → what other models say of them → learn → evaluate → draw …

Pipelines differ in their loss alone: fine-tuning learns to write what the assistant wrote, preferences to write rather
what was preferred, a reward model to score that higher, a student to come near to its teacher.
"""

from __future__ import annotations

from roll.pipelines.run import take_steps, whole_run
from roll.pipelines.supervised.course import Course, LossOf
from roll.protocols import LossFn

__all__ = ["train"]


async def train(course: Course, loss: LossFn | LossOf) -> None:
    """Take the remaining steps.

    Args:
        course: the run, its examples, and who learns from them.
        loss: of every batch.

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
