"""Does an engine hang? Judged by its own pace: how long it has taken for a step so far.

    patience = 12 x its slowest step of late, within 2 and 10 minutes, and never less than 3 x that step
             = 10 minutes before its first step, which may compile kernels and reads the first prompts

Only looks, some seconds apart, tell whether a step was made; so a pause between two steps is measured as the time
between two looks that saw steps, and is never taken for shorter than it was by more than one look.
"""

from __future__ import annotations

from collections import deque

__all__ = ["LOOK_S", "Pace"]

LOOK_S = 10.0
"""Between two looks."""
LEAST_S = 120.0
FIRST_STEP_S = 600.0
FACTOR, LEAST_FACTOR = 12.0, 3.0
RECENT = 256
"""Looks that saw a step, of which the slowest counts."""


class Pace:
    """What is known of one engine's steps.

    Args:
        now: of the running loop, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.since = now
        """When it made the last step that was seen, or was given something to do."""
        self._num_steps = 0
        self._gaps: deque[float] = deque(maxlen=RECENT)

    @property
    def slowest_s(self) -> float:
        """The longest time that it took for a step of late; 0 before its first."""
        return max(self._gaps, default=0.0)

    @property
    def patience_s(self) -> float:
        """After so long without a step it hangs."""
        if not self._gaps:
            return FIRST_STEP_S
        slowest = self.slowest_s
        return max(LEAST_FACTOR * slowest, min(FIRST_STEP_S, max(LEAST_S, FACTOR * slowest)))

    def begin(self, now: float) -> None:
        """It has something to do again."""
        self.since = now

    def look(self, now: float, num_steps: int, *, late_s: float = 0.0) -> bool:
        """Whether it hangs.

        Args:
            now: of the running loop, in seconds.
            num_steps: that it has made since it started.
            late_s: by how much this look came too late, because whoever looks was held up; so much longer may the
                engine's own reports be on their way.
        """
        self.since += late_s
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._gaps.append(now - self.since)
            self.since = now
        return now - self.since > self.patience_s
