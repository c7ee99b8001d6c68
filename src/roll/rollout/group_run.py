"""All attempts at one draw, in progress, with redundant rollouts and early stopping.

A group is complete as soon as its result is final; attempts that are then still running are stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from roll.rollout.attempts import Attempts, SamplingPlan
from roll.types import Group, PromptDraw, Rollout, RolloutId, RolloutStatus

__all__ = ["EarlyStopPredicate", "GroupRun"]

EarlyStopPredicate: TypeAlias = Callable[[Sequence[Rollout], int], bool]
"""Predicate of the scored rollouts so far and the number of missing ones: whether no outcome could pass the filters."""


class GroupRun:
    """Runs the attempts at one draw as tasks.

    Args:
        draw: The prompt draw.
        plans: Sampling plans; rollouts of the first plan form the group, those of the others are companions (a greedy
            answer for a baseline), returned separately.
        attempts: Makes rollouts.
        num_launched: Rollouts to start for the group; those beyond `plans[0].group_size` are redundant.
        first_finished: Whether the first rollouts that finish form the group, or those that were launched first.
        early_stop: Predicate that tells whether the group can no longer pass its filters.
        on_start: Called when the first rollout gets an engine.
        on_end: Called once, when the group is complete, can no longer pass its filters, or has failed with an error.
        before_reward: Event for which scoring waits.
    """

    def __init__(
        self,
        draw: PromptDraw,
        plans: Sequence[SamplingPlan],
        attempts: Attempts,
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
        """An error that is neither the model's nor the infrastructure's."""
        self.ended = False
        self.stopped_early = False
        self._attempts = attempts
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
                work = attempts.attempt(draw, index, plan, on_start=self._start, before_reward=before_reward)
                rollout_id = plan.rollout_id(draw, index)
                self._running[task := asyncio.create_task(work, name=str(rollout_id))] = rollout_id
                task.add_done_callback(self._finish)

    @property
    def group(self) -> Group:
        """The group with its chosen rollouts; complete once the run has ended."""
        chosen = self._chosen()
        return Group(draw=self.draw, rollouts=tuple(chosen))

    @property
    def companions(self) -> Mapping[str, Group]:
        """The groups of the other plans, by purpose."""
        return {
            purpose: Group(draw=self.draw, rollouts=tuple(done[i] for i in sorted(done)))
            for purpose, done in self._companions.items()
        }

    @property
    def scored(self) -> list[Rollout]:
        """All scored rollouts of the group itself, chosen or not."""
        return [rollout for rollout in self._done.values() if _counts(rollout)]

    @property
    def num_stopped(self) -> int:
        """Number of attempts of the group itself that were stopped or have not ended."""
        return self._num_launched - len(self._done)

    @property
    def all_scored(self) -> list[Rollout]:
        """All scored rollouts, including those of companions."""
        return [r for done in (self._done, *self._companions.values()) for r in done.values() if _counts(r)]

    def stop(self) -> None:
        """Cancel the running attempts; `on_end` is not called any more."""
        self.ended = True
        for task in self._running:
            task.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[Rollout]]:
        """Tasks of attempts that have not ended, including canceled ones."""
        return list(self._running)

    def _start(self) -> None:
        if not self._started:
            self._started = True
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
        if self.ended:  # it finished at the moment at which it was stopped
            self._attempts.discard(task.result())
            return
        if rollout_id.purpose != self._plan.purpose:
            self._companions[rollout_id.purpose][rollout_id.index] = task.result()
        else:
            self._done[rollout_id.index] = task.result()
            self.stopped_early = not self._complete() and self._cannot_pass_filter()
        if self.stopped_early or (self._complete() and self._companions_complete()):
            self._end()

    def _cannot_pass_filter(self) -> bool:
        """Return whether the group can no longer pass its filters, whatever rollouts join those that are sure to be in
        it.
        """
        if self._early_stop is None:
            return False
        good = sorted(index for index, rollout in self._done.items() if _counts(rollout))
        running = self._running_indices()
        size = self._plan.group_size
        if self._first_finished:
            sure = good
        else:
            sure = [index for index in good if sum(other < index for other in (*good, *running)) < size]
        missing = size - len(sure)
        others = len(good) - len(sure) + len(running)
        return 0 < missing <= others and self._early_stop([self._done[index] for index in sure], missing)

    def _end(self) -> None:
        if self.ended:
            return
        self.stop()
        self._on_end(self)

    def _companions_complete(self) -> bool:
        return not any(running.purpose in self._companions for running in self._running.values())

    def _running_indices(self) -> list[int]:
        """Return the indices of the group's own attempts that have not ended."""
        return [running.index for running in self._running.values() if running.purpose == self._plan.purpose]

    def _complete(self) -> bool:
        """Return whether the group's result is final."""
        running = self._running_indices()
        if not running:
            return True
        good = sorted(index for index, rollout in self._done.items() if _counts(rollout))
        size = self._plan.group_size
        if len(good) < size:
            return False
        return self._first_finished or good[size - 1] < min(running)

    def _chosen(self) -> list[Rollout]:
        """Return the group's rollouts, by index; failed ones are included only if there are not enough others."""
        good = [rollout for rollout in self._done.values() if _counts(rollout)]  # in the order in which they finished
        if not self._first_finished:
            good.sort(key=lambda rollout: rollout.index)
        size = self._plan.group_size
        failed = sorted((r for r in self._done.values() if not _counts(r)), key=lambda rollout: rollout.index)
        return sorted([*good[:size], *failed[: max(0, size - len(good))]], key=lambda rollout: rollout.index)


def _counts(rollout: Rollout) -> bool:
    return rollout.status is RolloutStatus.COMPLETED
