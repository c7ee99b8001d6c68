"""Adaptive limits on the CPU time of a case (RollPacker, arXiv 2509.21009, section 4.3).

    T = min(max(T_min, lambda * T_anchor), T_max)      T_anchor = largest CPU time of a right answer to this case

The limit is on CPU time, not wall time: on a busy machine a program waits longer, but uses the same CPU time. Until a
right answer to a case is known, its limit is T_max, so that no right answer is cut off.

Anchors are part of a checkpoint: without them a resumed run would be more lenient than before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from roll.config.rewards.code import CodeReward

__all__ = ["AdaptiveLimits"]

MAX_CASES = 1_000_000


class AdaptiveLimits:
    """Computes the CPU time limit of each case of a prompt from the time that right answers needed.

    If the times of too many cases are stored, those of the least recently used prompt are evicted first.
    """

    def __init__(self, config: CodeReward, max_cases: int = MAX_CASES) -> None:
        self._config = config
        self._most_cases = max_cases
        self._anchors: OrderedDict[str, dict[int, float]] = OrderedDict()
        self._num_cases = 0

    def compute_cpu_limit_s(self, uid: str, case: int) -> float:
        """Return the limit on the CPU time of a case; `max_cpu_s` until a right answer to this case is recorded."""
        anchors = self._anchors.get(uid)
        if anchors is None:
            return self._config.max_cpu_s
        self._anchors.move_to_end(uid)
        if case not in anchors:
            return self._config.max_cpu_s
        return min(max(self._config.min_cpu_s, self._config.cpu_factor * anchors[case]), self._config.max_cpu_s)

    def record_pass(self, uid: str, case: int, cpu_s: float) -> None:
        """Record the CPU time that a right answer needed for a case; only the longest time of a case is kept."""
        anchors = self._anchors.setdefault(uid, {})
        self._anchors.move_to_end(uid)
        self._num_cases += case not in anchors
        anchors[case] = max(cpu_s, anchors.get(case, 0.0))
        while self._num_cases > self._most_cases and len(self._anchors) > 1:
            _, forgotten = self._anchors.popitem(last=False)
            self._num_cases -= len(forgotten)

    def state(self) -> dict[str, list[list[float]]]:
        """Return the recorded times as plain data: pairs of case and seconds by prompt, least recently used first."""
        return {uid: [[case, cpu_s] for case, cpu_s in anchors.items()] for uid, anchors in self._anchors.items()}

    def restore(self, state: Any) -> None:
        """Restore the recorded times that `state` returned; they replace the current ones."""
        self._anchors = OrderedDict((uid, {int(case): float(s) for case, s in pairs}) for uid, pairs in state.items())
        self._num_cases = sum(map(len, self._anchors.values()))
