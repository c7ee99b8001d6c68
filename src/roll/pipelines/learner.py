"""The trainers of a run by role, and functions that run their optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roll.algorithms.minibatches import split_into_minibatches
from roll.config.algorithm_parts import UpdateConfig
from roll.errors import InfraError, PartialUpdateError
from roll.pipelines.checkpoint_files import SavedRun
from roll.pipelines.run import Run
from roll.pipelines.snapshots import PolicySnapshots
from roll.protocols import LossFn, Scorer, TrainerGroup
from roll.types import (
    BatchCounts,
    ForwardBackwardResult,
    ForwardOptions,
    OptimResult,
    OutputName,
    Outputs,
    StepResult,
    TrainingBatch,
)

__all__ = ["BaseModelScorer", "Learner", "accumulate_gradients", "apply_gradients", "train_policy", "update"]


class BaseModelScorer:
    """A policy with its LoRA adapters disabled; implements `Scorer`."""

    def __init__(self, policy: TrainerGroup) -> None:
        self._policy = policy

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[OutputName, list[Any]]:
        """Compute outputs of the policy without its adapters, as `Scorer.forward` specifies."""
        return await self._policy.forward(batch, outputs, ForwardOptions(adapter=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """The trained models, and the frozen models that the losses compare them with."""

    policy: TrainerGroup
    critics: tuple[TrainerGroup, ...] = ()
    """Value models, if the algorithm uses any."""
    reference: Scorer | None = None
    """The initial policy, if the loss or the reward uses it."""
    teachers: tuple[Scorer, ...] = ()
    """Teachers, if they are separate roles."""
    snapshots: PolicySnapshots | None = None
    """Earlier policy versions, if tokens are scored under the version that sampled them."""
    replays_experts: bool = False
    """True if updates replay the MoE experts that the policy chose before the update."""
    replays_engine: bool = False
    """True if updates replay the MoE experts that engines chose."""

    async def load(self, saved: SavedRun[Any]) -> None:
        """Restore the policy and the critics from a checkpoint."""
        await saved.restore(self.policy, self.critics)


async def update(run: Run[Any], trainer: TrainerGroup, batch: TrainingBatch, loss: LossFn) -> StepResult:
    """Run one optimizer step. Set `run.mid_update`, because the state at the last boundary can no longer be
    checkpointed.

    With a single rank, `run.mid_update` is reset if the first optimizer step since the boundary fails before it changes
    any weight.
    """
    with _mark_mid_update(run, trainer):
        result = await trainer.train_step(batch, loss)
    run.has_trained |= result.stepped
    return result


async def accumulate_gradients(
    run: Run[Any], trainer: TrainerGroup, batch: TrainingBatch, loss: LossFn, counts: BatchCounts, *, last: bool
) -> ForwardBackwardResult:
    """Add the gradient of a batch. Weights do not change, so the state at the last boundary can still be checkpointed.
    After an error in a run with several ranks, it cannot, because other ranks may wait for the failed rank.
    """
    try:
        return await trainer.forward_backward(batch, loss, counts, last=last)
    except Exception:
        run.mid_update |= trainer.num_ranks > 1
        raise


async def apply_gradients(run: Run[Any], trainer: TrainerGroup, scale: float) -> OptimResult:
    """Update the weights with the accumulated gradients times `scale`, and set `run.mid_update` as `update` does."""
    with _mark_mid_update(run, trainer):
        result = await trainer.optim_step(scale=scale)
    run.has_trained |= result.stepped
    return result


@contextmanager
def _mark_mid_update(run: Run[Any], trainer: TrainerGroup) -> Iterator[None]:
    """Set `run.mid_update` for the step in the `with` block; reset it if the step fails before it changes a weight."""
    is_first, run.mid_update = not run.mid_update, True
    try:
        yield
    except (PartialUpdateError, InfraError):
        raise
    except Exception:
        run.mid_update = not (is_first and trainer.num_ranks == 1)  # other ranks would wait for the failed one
        raise


async def train_policy(
    run: Run[Any], policy: TrainerGroup, batch: TrainingBatch, loss: LossFn, updates: UpdateConfig
) -> list[StepResult]:
    """Run one optimizer step per mini-batch and epoch; the run's seed and step determine the mini-batches."""
    results = []
    for epoch in range(updates.num_epochs):
        for part in split_into_minibatches(batch, updates.num_minibatches, (run.seed, run.state.step, 0, epoch)):
            results.append(await update(run, policy, part, loss))
    return results
