"""Hang detection of an engine from its own pace, the duration of its recent steps.

    patience = 12 x its slowest recent step, between 2 and 10 minutes, and never less than 3 x that step
             = 10 minutes before its first step, which may compile kernels and prefill the first prompts

Steps are observed only by checks that are some seconds apart, so the gap between two steps is measured as the time
between two checks that saw steps, and is underestimated by at most one check interval.
"""

from __future__ import annotations

from collections import deque

__all__ = ["LOOK_S", "HangDetector"]

LOOK_S = 10.0
"""Time between two checks."""
LEAST_S = 120.0
FIRST_STEP_S = 600.0
FACTOR, LEAST_FACTOR = 12.0, 3.0
RECENT = 256
"""Number of recent checks that saw a step, of which the slowest counts."""


class HangDetector:
    """Observed pace of one engine's steps.

    Args:
        now: Time of the running loop, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.since = now
        """Time of the last observed step, or of the begin of new work."""
        self._num_steps = 0
        self._gaps: deque[float] = deque(maxlen=RECENT)

    @property
    def slowest_s(self) -> float:
        """Longest recent time between steps; 0 before the first step."""
        return max(self._gaps, default=0.0)

    @property
    def timeout_s(self) -> float:
        """Time without a step after which the engine counts as hanging."""
        if not self._gaps:
            return FIRST_STEP_S
        slowest = self.slowest_s
        return max(LEAST_FACTOR * slowest, min(FIRST_STEP_S, max(LEAST_S, FACTOR * slowest)))

    def begin(self, now: float) -> None:
        """Restart the clock when the engine has work again."""
        self.since = now

    def observe(self, now: float, num_steps: int, *, late_s: float = 0.0) -> bool:
        """Return whether the engine hangs.

        Args:
            now: Time of the running loop, in seconds.
            num_steps: Number of steps that the engine has made since it started.
            late_s: Delay of this check because the caller was held up; the engine's own reports may be late by as much.
        """
        self.since += late_s
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._gaps.append(now - self.since)
            self.since = now
        return now - self.since > self.timeout_s
