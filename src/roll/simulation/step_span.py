"""A span of engine steps between two changes to the batch; its duration is a quadratic polynomial of its length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from roll.simulation.requests import SimulatedRequest

__all__ = ["StepSpan"]


@dataclass(slots=True)
class StepSpan:
    """Consecutive steps of an unchanged batch; step k, counted from 0, takes `first_s + k * growth_s`."""

    start_s: float
    first_s: float
    growth_s: float
    num_steps: int
    chunks: list[tuple[SimulatedRequest, int]] = field(default_factory=list)
    """Prefill chunks (request, number of tokens); a span with chunks has only one step."""

    def compute_time(self, num_steps: int) -> float:
        """Return the time at which the first `num_steps` steps are done."""
        return self.start_s + num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) / 2)

    def count_done_steps(self, now: float) -> int:
        """Return the number of steps that are done at time `now`."""
        elapsed = now - self.start_s
        if elapsed <= 0:
            return 0
        half = self.first_s - self.growth_s / 2
        guess = int(2 * elapsed / (half + math.sqrt(half * half + 2 * self.growth_s * elapsed)))
        guess = min(max(guess, 0), self.num_steps)
        while guess < self.num_steps and self.compute_time(guess + 1) <= now:
            guess += 1
        while guess > 0 and self.compute_time(guess) > now:
            guess -= 1
        return guess
