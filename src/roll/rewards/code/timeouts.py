"""How long a case may run: adaptive limits on CPU time (RollPacker, arXiv 2509.21009, section 3.3).

    T = min(max(T_min, lambda * T_anchor), T_max)      T_anchor = largest CPU time of a right answer to this case

CPU time, not wall time: a program on a machine with other work waits, but uses no more of it. Until a case has had a
right answer, its limit is T_max, so that no right answer is ever cut off for want of an earlier one.
"""

from __future__ import annotations

from collections import OrderedDict

from roll.config.code_rewards import CodeReward

__all__ = ["AdaptiveLimits"]

MOST_CASES = 1_000_000


class AdaptiveLimits:
    """Limits by prompt and case; what was not asked for longest is forgotten."""

    def __init__(self, config: CodeReward) -> None:
        self._config = config
        self._anchors: OrderedDict[tuple[str, int], float] = OrderedDict()

    def cpu_s(self, uid: str, case: int) -> float:
        """Limit on the CPU time of a case."""
        anchor = self._anchors.get((uid, case))
        if anchor is None:
            return self._config.max_cpu_s
        self._anchors.move_to_end((uid, case))
        return min(max(self._config.min_cpu_s, self._config.cpu_factor * anchor), self._config.max_cpu_s)

    def passed(self, uid: str, case: int, cpu_s: float) -> None:
        """A right answer took so long."""
        self._anchors[uid, case] = max(cpu_s, self._anchors.get((uid, case), 0.0))
        if len(self._anchors) > MOST_CASES:
            self._anchors.popitem(last=False)
