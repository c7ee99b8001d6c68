"""Training a reward model in one short loop:

draw examples → score the preferred answer higher, or as its row says → evaluate → draw …
"""

from __future__ import annotations

from roll.algorithms.losses import BradleyTerryLoss, RegressionLoss
from roll.config.pipelines.reward_model import RewardModelSection
from roll.pipelines.run import take_steps, whole_run
from roll.pipelines.supervised.course import Course
from roll.protocols import LossFn

__all__ = ["BRADLEY_TERRY", "REGRESSION", "loss_of", "train"]

BRADLEY_TERRY, REGRESSION = BradleyTerryLoss(), RegressionLoss()


def loss_of(section: RewardModelSection) -> LossFn:
    """What scores are learnt by."""
    return REGRESSION if section.loss == "regression" else BradleyTerryLoss(centring=section.centring)


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
