"""LongRounds: tail batching with α > 0 (RollPacker, arXiv 2509.21009, for asynchronous training).

A step never waits for a group whose deadline has come while N other groups are ready: the group is stopped, and its
prompt is deferred. N deferred prompts are launched together, as a long round, before any new prompt. Their long answers
are then generated concurrently, so that the run waits once for all of them instead of once for each.

Invariants:
    - a prompt is deferred at most once: the groups of a long round are mandatory, and a step waits for them;
    - tokens of a stopped group are discarded, so the staleness bound holds as without deferral;
    - the remaining steps can train all live and deferred groups: near the end of a run, fewer new prompts are launched,
      and a long round starts before N prompts are deferred.
"""

from __future__ import annotations

from typing import NamedTuple

from roll.rollout.buffer import LiveGroup, SampleBuffer
from roll.types import PromptDraw

__all__ = ["LaunchPlan", "LongRounds"]


class LaunchPlan(NamedTuple):
    """The numbers of deferred and of new prompts to launch now."""

    num_deferred: int
    num_new: int


class LongRounds:
    """Decides which groups a step defers, and when deferred prompts are launched.

    Args:
        batch_size: Groups per step, N.
        num_pending: Number of draws that were in flight when an earlier process ended; they are launched immediately.
        enabled: False without tail batching or with α = 0; no group is deferred then.
    """

    def __init__(self, batch_size: int, num_pending: int, *, enabled: bool) -> None:
        self._batch_size = batch_size
        self._enabled = enabled
        self._num_open = num_pending
        """Number of deferred prompts that the current long round has not launched yet."""
        self._mandatory: set[int] = set()

    def choose_deferred(self, buffer: SampleBuffer) -> list[LiveGroup]:
        """Choose the groups to defer because a step would have to wait for them; record and return these groups."""
        if not self._enabled:
            return []
        chosen = [live for live in buffer.list_blocking_groups() if live.draw_id not in self._mandatory]
        self._mandatory.update(live.draw_id for live in chosen)
        return chosen

    def is_mandatory(self, draw: PromptDraw) -> bool:
        """Return whether a prompt was deferred before, so that its group must finish."""
        return draw.draw_id in self._mandatory

    def remove(self, draw_id: int) -> None:
        """Remove the record of a prompt that was used for training."""
        self._mandatory.discard(draw_id)

    def plan_launch(self, num_free: int, num_deferred: int, num_slots: int | None) -> LaunchPlan:
        """Return the number of prompts to launch.

        Args:
            num_free: Number of groups that may be launched.
            num_deferred: Number of deferred prompts.
            num_slots: Number of groups that the remaining steps can train on in addition to the live groups; `None` if
                the number of steps is unknown.
        """
        if not self._enabled:
            count = min(num_free, num_deferred)
            return LaunchPlan(count, num_free - count)
        is_last = num_slots is not None and num_deferred >= num_slots
        if not self._num_open and (num_deferred >= self._batch_size or is_last):
            self._num_open = num_deferred if is_last else self._batch_size
        count = min(num_free, self._num_open, num_deferred)
        self._num_open -= count
        new = num_free - count
        if num_slots is not None:
            new = min(new, num_slots - num_deferred)
        return LaunchPlan(count, max(0, new))
