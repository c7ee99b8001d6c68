"""GroupRun: generates the rollouts of one draw, with redundant rollouts and early stopping.

A group is complete as soon as its result is final. The rollouts that are still running are then stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from roll.rollout.attempts import RolloutRunner, SamplingPlan
from roll.types import Group, PromptDraw, Rollout, RolloutId, RolloutStatus

__all__ = ["EarlyStopPredicate", "GroupRun"]

EarlyStopPredicate: TypeAlias = Callable[[Sequence[Rollout], int], bool]
"""Returns whether a group can no longer pass the filters, given its scored rollouts and the number of missing ones."""


class GroupRun:
    """Runs the rollouts of one draw as tasks.

    Args:
        draw: The sampled prompt.
        plans: Sampling plans. Rollouts of the first plan form the group; each other plan forms a companion group, such
            as a greedy answer for a baseline.
        runner: Runs single rollouts.
        num_launched: Number of rollouts to start for the group; those beyond `plans[0].group_size` are redundant.
        first_finished: If True, the group consists of the rollouts that finish first, otherwise of the rollouts that
            were launched first.
        early_stop: Predicate that returns whether the group can no longer pass its filters.
        on_start: Called once, when an engine receives the first request of the first rollout to start.
        on_end: Called once, when the group is complete, can no longer pass its filters, or has failed with an error.
        before_reward: Event that must be set before rollouts are scored.
    """

    def __init__(
        self,
        draw: PromptDraw,
        plans: Sequence[SamplingPlan],
        runner: RolloutRunner,
        *,
        num_launched: int | None = None,
        first_finished: bool = False,
        early_stop: EarlyStopPredicate | None = None,
        on_start: Callable[[GroupRun], None] = lambda run: None,
        on_end: Callable[[GroupRun], None] = lambda run: None,
        before_reward: asyncio.Event | None = None,
    ) -> None:
        self.draw = draw
        self.error: BaseException | None = None
        """An unexpected error, caused neither by the model nor by infrastructure."""
        self.ended = False
        self.began_s: float | None = None
        """Time at which an engine received the group's first request; `None` before."""
        self.ended_s: float | None = None
        """Time at which the group ended; `None` before, and if it was stopped."""
        self.stopped_early = False
        self._runner = runner
        self._plan = plans[0]
        self._first_finished = first_finished
        self._early_stop = early_stop
        self._on_end = on_end
        self._on_start = on_start
        self._started = False
        self._num_launched = num_launched or plans[0].group_size
        self._done: dict[int, Rollout] = {}
        self._companions: dict[str, dict[int, Rollout]] = {plan.purpose: {} for plan in plans[1:]}
        self._running: dict[asyncio.Task[Rollout], RolloutId] = {}
        for plan in plans:
            count = (num_launched or plan.group_size) if plan is self._plan else plan.group_size
            for index in range(count):
                work = runner.generate_and_score(draw, index, plan, on_start=self._start, before_reward=before_reward)
                rollout_id = plan.build_rollout_id(draw, index)
                self._running[task := asyncio.create_task(work, name=str(rollout_id))] = rollout_id
                task.add_done_callback(self._finish)

    @property
    def group(self) -> Group:
        """The group with its chosen rollouts; complete when the run has ended."""
        chosen = self._choose_rollouts()
        return Group(draw=self.draw, rollouts=tuple(chosen))

    @property
    def companions(self) -> Mapping[str, Group]:
        """The companion groups, by purpose."""
        return {
            purpose: Group(draw=self.draw, rollouts=tuple(done[i] for i in sorted(done)))
            for purpose, done in self._companions.items()
        }

    @property
    def scored_rollouts(self) -> list[Rollout]:
        """All scored rollouts of the group, chosen or not, without companions."""
        return [rollout for rollout in self._done.values() if _is_scored(rollout)]

    @property
    def num_launched(self) -> int:
        """Number of rollouts that were started for the group; companions are not counted."""
        return self._num_launched

    @property
    def num_finished(self) -> int:
        """Number of the group's rollouts that have ended without being stopped; companions are not counted."""
        return len(self._done)

    @property
    def num_stopped(self) -> int:
        """Number of the group's rollouts that were stopped or have not ended; companions are not counted."""
        return self._num_launched - len(self._done)

    @property
    def all_scored_rollouts(self) -> list[Rollout]:
        """All scored rollouts, including those of companions."""
        return [r for done in (self._done, *self._companions.values()) for r in done.values() if _is_scored(r)]

    def stop(self) -> None:
        """Cancel the running rollouts; `on_end` is then not called."""
        self.ended = True
        for task in self._running:
            task.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[Rollout]]:
        """Tasks of rollouts that have not ended, including canceled ones."""
        return list(self._running)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.began_s = asyncio.get_running_loop().time()
            self._on_start(self)

    def _finish(self, task: asyncio.Task[Rollout]) -> None:
        rollout_id = self._running.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.error = self.error or error
            self._end()
            return
        if self.ended:  # the rollout finished in the same iteration of the event loop in which it was canceled
            self._runner.discard(task.result())
            return
        if rollout_id.purpose != self._plan.purpose:
            self._companions[rollout_id.purpose][rollout_id.index] = task.result()
        else:
            self._done[rollout_id.index] = task.result()
            self.stopped_early = not self._is_complete() and self._must_fail_filter()
        if self.stopped_early or (self._is_complete() and self._are_companions_complete()):
            self._end()

    def _must_fail_filter(self) -> bool:
        """Return whether the group cannot pass its filters, whatever the results of its unfinished rollouts are."""
        if self._early_stop is None:
            return False
        good = sorted(index for index, rollout in self._done.items() if _is_scored(rollout))
        running = self._list_running_indices()
        size = self._plan.group_size
        if self._first_finished:
            sure = good
        else:
            sure = [index for index in good if sum(other < index for other in (*good, *running)) < size]
        missing = size - len(sure)
        others = len(good) - len(sure) + len(running)
        # If there are too few others, failed rollouts complete the group, but the predicate needs rewards of all.
        return 0 < missing <= others and self._early_stop([self._done[index] for index in sure], missing)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended_s = asyncio.get_running_loop().time()
        self.stop()
        self._on_end(self)

    def _are_companions_complete(self) -> bool:
        return not any(running.purpose in self._companions for running in self._running.values())

    def _list_running_indices(self) -> list[int]:
        """Return the indices of the group's rollouts that have not ended, without companions."""
        return [running.index for running in self._running.values() if running.purpose == self._plan.purpose]

    def _is_complete(self) -> bool:
        """Return whether the group's result is final."""
        running = self._list_running_indices()
        if not running:
            return True
        good = sorted(index for index, rollout in self._done.items() if _is_scored(rollout))
        size = self._plan.group_size
        if len(good) < size:
            return False
        # In launch order, a running rollout with a lower index would still displace a finished one.
        return self._first_finished or good[size - 1] < min(running)

    def _choose_rollouts(self) -> list[Rollout]:
        """Return the group's rollouts, sorted by index; failed rollouts are included only if too few were scored."""
        good = [
            rollout for rollout in self._done.values() if _is_scored(rollout)
        ]  # in the order in which they finished
        if not self._first_finished:
            good.sort(key=lambda rollout: rollout.index)
        size = self._plan.group_size
        failed = sorted((r for r in self._done.values() if not _is_scored(r)), key=lambda rollout: rollout.index)
        return sorted([*good[:size], *failed[: max(0, size - len(good))]], key=lambda rollout: rollout.index)


def _is_scored(rollout: Rollout) -> bool:
    return rollout.status is RolloutStatus.COMPLETED
