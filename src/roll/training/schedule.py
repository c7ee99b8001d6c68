"""The learning rate over the optimiser steps of a run."""

from __future__ import annotations

import math

from roll.config.training import TrainingConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Learning rate of optimiser step `step` (0, 1, …); only steps that moved the weights count.

    It rises linearly over `warmup_steps` (the first step already moves: peak / warmup_steps), is at its peak
    right after, and then stays, or falls linearly or along a half cosine so that it would reach 0 at
    `num_steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    remaining = max(config.num_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / remaining, 1.0)
    factor = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * factor
