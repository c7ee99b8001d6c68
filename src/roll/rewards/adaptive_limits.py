"""Adaptive limits on the CPU time of verification (RollPacker, arXiv 2509.21009, section 4.3).

    T = min(max(T_min, lambda * T_anchor), T_max)      T_anchor = largest CPU time of a correct answer

The limit is on CPU time, not wall time: on a busy machine a verifier waits longer, but uses the same CPU time. Until
enough correct answers are known, the limit is T_max, so that no correct answer is stopped.

Anchors are part of a checkpoint: without them a resumed run would be more lenient than before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["AdaptiveLimits"]

MAX_CASES = 1_000_000


class AdaptiveLimits:
    """Computes the CPU time limit of each case of a prompt from the CPU time of correct answers.

    If too many cases are stored, the least recently used prompts are evicted first.

    Args:
        min_cpu_s: Minimum of the limit.
        max_cpu_s: Maximum of the limit, which applies until enough correct answers are recorded.
        factor: Limit as a multiple of the CPU time of the slowest correct answer.
        min_right: Number of correct answers that must be recorded before the limit is adapted.
        max_cases: Maximum number of cases that are stored.
    """

    def __init__(
        self, min_cpu_s: float, max_cpu_s: float, factor: float, *, min_right: int = 1, max_cases: int = MAX_CASES
    ) -> None:
        self._min_cpu_s, self._max_cpu_s, self._factor = min_cpu_s, max_cpu_s, factor
        self._min_right = min_right
        self._max_cases = max_cases
        self._anchors: OrderedDict[str, dict[int, tuple[float, int]]] = OrderedDict()
        """Largest CPU time and number of correct answers, by prompt and case."""
        self._num_cases = 0

    def compute_cpu_limit_s(self, uid: str, case: int) -> float:
        """Return the CPU time limit of a case, which is the maximum until enough correct answers are recorded."""
        anchors = self._anchors.get(uid)
        if anchors is None:
            return self._max_cpu_s
        self._anchors.move_to_end(uid)
        anchor_s, num_right = anchors.get(case, (0.0, 0))
        if num_right < self._min_right:
            return self._max_cpu_s
        return min(max(self._min_cpu_s, self._factor * anchor_s), self._max_cpu_s)

    def record_pass(self, uid: str, case: int, cpu_s: float) -> None:
        """Record the CPU time that a correct answer needed for a case; only the longest time of a case is kept."""
        anchors = self._anchors.setdefault(uid, {})
        self._anchors.move_to_end(uid)
        self._num_cases += case not in anchors
        anchor_s, num_right = anchors.get(case, (0.0, 0))
        anchors[case] = max(cpu_s, anchor_s), num_right + 1
        while self._num_cases > self._max_cases and len(self._anchors) > 1:
            _, evicted = self._anchors.popitem(last=False)
            self._num_cases -= len(evicted)

    def state(self) -> dict[str, list[list[float]]]:
        """Return the recorded times as plain data, least recently used prompts first.

        The result maps each prompt to lists of case, seconds and number of correct answers.
        """
        return {uid: [[case, *anchor] for case, anchor in anchors.items()] for uid, anchors in self._anchors.items()}

    def restore(self, state: Any) -> None:
        """Replace the recorded times with the times that `state` returned.

        Checkpoints of earlier versions lack the numbers of correct answers, which are then assumed to be sufficient.
        """
        self._anchors = OrderedDict(
            (
                uid,
                {
                    int(case): (float(cpu_s), int(num_right[0]) if num_right else self._min_right)
                    for case, cpu_s, *num_right in entries
                },
            )
            for uid, entries in state.items()
        )
        self._num_cases = sum(map(len, self._anchors.values()))
