"""The learning rate schedule over the optimizer steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from roll.config.training import TrainingConfig

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate schedule of one trainer, counted in the optimizer steps of this trainer.

    A step of the run may contain several optimizer steps (`algorithm.updates`), or none while only critics warm up.
    """

    peak: float
    """The peak learning rate."""
    num_updates: int
    """The number of optimizer steps of the whole run; the decay would reach 0 at this step."""
    num_warmup: int = 0
    """The number of warmup steps, over which the rate increases."""
    shape: Literal["constant", "linear", "cosine"] = "constant"

    @classmethod
    def from_config(
        cls,
        training: TrainingConfig,
        *,
        updates_per_step: int = 1,
        idle_steps: int = 0,
        peak_learning_rate: float | None = None,
    ) -> Schedule:
        """Build the schedule of a configuration.

        Args:
            training: The training configuration, with counts in steps of the run.
            updates_per_step: The number of optimizer steps of this trainer in each step of the run.
            idle_steps: The number of steps of the run in which this trainer is not updated.
            peak_learning_rate: The peak learning rate; by default `training.learning_rate`.
        """
        return cls(
            peak=training.learning_rate if peak_learning_rate is None else peak_learning_rate,
            num_updates=max(training.num_steps - idle_steps, 0) * updates_per_step,
            num_warmup=training.warmup_steps * updates_per_step,
            shape=training.schedule,
        )

    def compute_learning_rate(self, update: int) -> float:
        """Return the learning rate of optimizer step `update` (0, 1, …); steps that did not change the weights are not
        counted.

        The rate increases linearly to the peak over `num_warmup` steps (the rate of the first step is peak /
        num_warmup). Then it is constant, or decays linearly or along a half cosine and would reach 0 at `num_updates`.
        """
        if update < self.num_warmup:
            return self.peak * (update + 1) / self.num_warmup
        if self.shape == "constant":
            return self.peak
        remaining = max(self.num_updates - self.num_warmup, 1)
        progress = min((update - self.num_warmup) / remaining, 1.0)
        factor = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * factor
