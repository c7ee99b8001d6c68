"""Training loop on examples:

draw examples → outputs of other models → learn → evaluate → draw …

Pipelines differ only in their loss: fine-tuning imitates the assistant's messages, preference training prefers the
chosen answers, a reward model scores the chosen answers higher, distillation imitates a teacher.
"""

from __future__ import annotations

from roll.pipelines.run import run_session, take_steps
from roll.pipelines.supervised.supervised_run import LossOf, SupervisedRun
from roll.protocols import LossFn

__all__ = ["train"]


async def train(course: SupervisedRun, loss: LossFn | LossOf) -> None:
    """Run the remaining steps.

    Args:
        course: The run, its examples, and the trained model.
        loss: Loss of every batch.

    Raises:
        AlarmError: An alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: A signal requested a stop; everything up to the last step's boundary is saved.
    """

    async def step() -> list[str]:
        drawn = await course.draw()
        result = await course.learn(drawn, loss)
        alarms = course.finish_step(drawn, result)
        await course.evaluate_if_due(loss)
        return alarms

    async with run_session(course.run):
        await course.evaluate_if_due(loss)
        await take_steps(course.run, step)
