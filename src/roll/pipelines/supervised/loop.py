"""Training loop on examples:

draw examples → outputs of other models → learn → evaluate → draw …

Pipelines differ only in their loss: fine-tuning imitates the assistant's messages, preference training prefers the
chosen answers, reward-model training scores chosen answers higher, and distillation imitates a teacher.
"""

from __future__ import annotations

from roll.pipelines.run import run_session, run_steps
from roll.pipelines.supervised.supervised_run import LossBuilder, SupervisedRun
from roll.protocols import LossFn

__all__ = ["train"]


async def train(supervised: SupervisedRun, loss: LossFn | LossBuilder) -> None:
    """Run the remaining steps.

    Args:
        supervised: The run, its examples, and the trained model.
        loss: Loss of every batch.

    Raises:
        AlarmError: An alarm stops the run; everything up to this step's boundary is saved.
        Interrupted: A signal requested a stop; everything up to the last step's boundary is saved.
    """

    async def step() -> list[str]:
        drawn = await supervised.draw()
        result = await supervised.learn(drawn, loss)
        alarms = supervised.finish_step(drawn, result)
        await supervised.evaluate_if_due(loss)
        return alarms

    async with run_session(supervised.run):
        await supervised.evaluate_if_due(loss)
        await run_steps(supervised.run, step)
