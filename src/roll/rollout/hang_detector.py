"""Detect a hanging engine, with a timeout derived from the duration of its recent steps.

    timeout = 12 x the slowest recent step, between 2 and 10 minutes, but at least 3 x that step
            = 10 minutes before the first step, which may compile kernels and prefill the first prompts

Steps are observed only by periodic checks. So the duration of a step is measured as the time between two checks with
progress, which is at most one check interval too short.
"""

from __future__ import annotations

from collections import deque

__all__ = ["CHECK_INTERVAL_S", "HangDetector"]

CHECK_INTERVAL_S = 10.0
"""Time between two checks, in seconds."""
MIN_TIMEOUT_S = 120.0
"""Minimum timeout after the first step, in seconds."""
FIRST_STEP_TIMEOUT_S = 600.0
"""Timeout for the first step, in seconds."""
TIMEOUT_FACTOR, MIN_TIMEOUT_FACTOR = 12.0, 3.0
"""Factors of the slowest recent step: the timeout, and its lower bound if steps are very slow."""
NUM_RECENT_STEPS = 256
"""Number of recent steps of which the slowest sets the timeout."""


class HangDetector:
    """Observes the steps of one engine, and decides whether it hangs.

    Args:
        now: Time of the running loop, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.last_progress = now
        """Time of the last observed step, or at which the engine got new work."""
        self._num_steps = 0
        self._gaps: deque[float] = deque(maxlen=NUM_RECENT_STEPS)

    @property
    def slowest_s(self) -> float:
        """Longest recent time between steps; 0 before the first step."""
        return max(self._gaps, default=0.0)

    @property
    def timeout_s(self) -> float:
        """Time without a step after which the engine is treated as hanging."""
        # The timeout is for a step: one for a request would depend on the longest possible answer.
        if not self._gaps:
            return FIRST_STEP_TIMEOUT_S
        slowest = self.slowest_s
        return max(
            MIN_TIMEOUT_FACTOR * slowest, min(FIRST_STEP_TIMEOUT_S, max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * slowest))
        )

    def restart_timeout(self, now: float) -> None:
        """Restart the timeout at time `now`, because the engine has work again."""
        self.last_progress = now

    def observe(self, now: float, num_steps: int, *, delay_s: float = 0.0) -> bool:
        """Record the engine's steps so far, and return whether the engine hangs.

        Args:
            now: Time of the running loop, in seconds.
            num_steps: Number of steps that the engine has made since it started.
            delay_s: Delay of this check because the event loop was busy; the engine's reports may have the same delay.
        """
        self.last_progress += delay_s
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._gaps.append(now - self.last_progress)
            self.last_progress = now
        return now - self.last_progress > self.timeout_s
