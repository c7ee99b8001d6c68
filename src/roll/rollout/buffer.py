"""Staleness bound of asynchronous runs: `SampleBuffer` stores untrained groups and decides which groups a step may
take.

    admit ──► (start: policy version v) ──► finish ──► take ──► pop_taken (trained)
                         └──────────────► discard (filtered, expired, aborted) ◄──┘

A group that began under policy version v may be used for the update from version n to n + 1 iff n - v <= A, the
staleness bound, so its deadline is the update at n = v + A. Each update takes N groups. A take of N groups at version n
is *admissible* iff every remaining group can still meet its deadline:

    for j = 0 … A:   #{live groups with v <= n - A + j} - #{of these taken}  <=  j N         (earliest deadline first)

An admissible take always exists among the live groups if at most N + ⌈αN⌉ groups wait to be taken, ⌈α⌉ = A, and at most
A N of them wait while others are trained. Proof by induction over n: for every j, the take at n leaves at most j N
groups with v <= n - A + j. Therefore the take at n + 1 finds at most j N groups with v <= (n + 1) - A + (j - 1), and at
most (1 + A) N groups in total. A step waits until the *finished* groups contain an admissible take. Taking the oldest
finished groups is admissible if any take is, because it removes the most groups from each of the sets above. With A = 0
every live group must be finished: synchronous training.

Invariants:
    - a group is admitted once, and is then live until its update is done, or discarded;
    - the number of live groups that are not taken never exceeds the limit passed to `admit`;
    - under `wait`, a group with n - v > A is never taken, and no group has to be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roll.rollout.group_run import GroupRun

__all__ = ["LiveGroup", "SampleBuffer"]


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group that was launched and has not been trained on yet."""

    run: GroupRun
    launch_order: int
    """Index in launch order."""
    version: int | None = None
    """Policy version under which the first rollout began; `None` if no rollout has begun, so the group does not age
    yet.
    """
    finish_order: int | None = None
    """Index in the order in which groups finished; `None` if the group has not finished."""
    is_taken: bool = False

    @property
    def draw_id(self) -> int:
        """Id of the group's draw."""
        return self.run.draw.draw_id


class SampleBuffer:
    """Stores live groups (launched, but not trained on yet), and decides which groups a step may take.

    Args:
        batch_size: Groups per update, N.
        max_staleness: Staleness bound A.
        enforce_deadlines: Whether `can_take` also requires that, after this step, every remaining group can still be
            used for training within the staleness bound. If False, groups may become too old for training; see
            `list_overdue`.
    """

    def __init__(self, batch_size: int, max_staleness: int, *, enforce_deadlines: bool = True) -> None:
        self.version = 0
        """The trainer's policy version n."""
        self.num_taken = 0
        """Number of groups that are being trained."""
        self.batch_size = batch_size
        """Number of groups of a batch, N."""
        self._max_staleness = max_staleness
        self._enforce_deadlines = enforce_deadlines
        self._live: dict[int, LiveGroup] = {}
        self._num_admitted = 0
        self._num_finished = 0
        self._ready: dict[int, LiveGroup] = {}
        self._untaken: dict[int | None, int] = {}
        self._untaken_ready: dict[int | None, int] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveGroup]:
        """Iterate over live groups, in launch order."""
        return iter(self._live.values())

    def __getitem__(self, draw_id: int) -> LiveGroup:
        return self._live[draw_id]

    def __contains__(self, draw_id: int) -> bool:
        return draw_id in self._live

    @property
    def num_ready(self) -> int:
        """Number of finished groups that no step has taken yet."""
        return len(self._ready)

    @property
    def num_finished(self) -> int:
        """Number of groups that have finished since the start."""
        return self._num_finished

    @property
    def num_missing(self) -> int:
        """Number of groups that must still finish for the next step."""
        return max(0, self.batch_size - self.num_ready)

    @property
    def ready_groups(self) -> list[LiveGroup]:
        """Finished groups that no step has taken yet, in the order in which they finished."""
        return list(self._ready.values())

    @property
    def running_groups(self) -> list[LiveGroup]:
        """Groups that have not finished, in launch order."""
        return [live for live in self._live.values() if live.finish_order is None]

    def admit(self, run: GroupRun, limit: int) -> None:
        """Add a launched group; at most `limit` live groups, including this group, may wait for a step to take them."""
        draw_id = run.draw.draw_id
        assert draw_id not in self._live, f"draw {draw_id} was admitted twice"
        waiting = len(self._live) - self.num_taken
        assert waiting < limit, f"{waiting} groups are live and not taken, the limit is {limit}"
        self._live[draw_id] = LiveGroup(run, self._num_admitted)
        self._num_admitted += 1
        self._adjust_count(self._untaken, None, 1)

    def record_start(self, draw_id: int) -> None:
        """Record that a group's first rollout begins under the current policy version."""
        live = self._live.get(draw_id)
        if live is not None and live.version is None:
            self._adjust_count(self._untaken, None, -1)
            live.version = self.version
            self._adjust_count(self._untaken, live.version, 1)

    def record_finish(self, draw_id: int) -> None:
        """Record that a group has all of its rollouts and rewards."""
        live = self._live[draw_id]
        assert live.finish_order is None, f"group {draw_id} finished twice"
        live.finish_order = self._num_finished
        self._num_finished += 1
        self._ready[draw_id] = live
        self._adjust_count(self._untaken_ready, live.version, 1)

    def discard(self, draw_id: int) -> None:
        """Remove a group that will not be used for training."""
        live = self._live.pop(draw_id)
        assert not live.is_taken, f"group {draw_id} is being trained"
        self._subtract_from_counts(live)

    def can_take(self) -> bool:
        """Return whether enough groups for the step have finished: N groups, or all groups if there are fewer.

        With `enforce_deadlines`, also require that every remaining group can still meet its deadline after this step.
        """
        return self._has_enough_ready() and (not self._enforce_deadlines or self._find_overfull_deadline() is None)

    def list_blocking_groups(self) -> list[LiveGroup]:
        """Return the running groups that the step must wait for even if N groups have finished.

        These are the oldest of the groups whose deadline could not be met after this step.
        """
        if not self._has_enough_ready() or (overfull := self._find_overfull_deadline()) is None:
            return []
        version, excess = overfull
        groups = [live for live in self.running_groups if live.version is not None and live.version <= version]
        return sorted(groups, key=lambda live: (live.version, live.launch_order))[:excess]

    def list_due_groups(self, version: int) -> list[LiveGroup]:
        """Return the running groups without which no step at this policy version may begin, since they would be too
        old for the next step."""
        if not self._enforce_deadlines:
            return []
        last = version - self._max_staleness
        return [live for live in self.running_groups if live.version is not None and live.version <= last]

    def _has_enough_ready(self) -> bool:
        untaken = sum(self._untaken.values())
        return bool(untaken) and self.num_ready >= min(self.batch_size, untaken)

    def _find_overfull_deadline(self) -> tuple[int, int] | None:
        """Find the earliest deadline that some live groups would miss after this step.

        Return the policy version whose groups have this deadline, and the number of groups that would miss it; return
        `None` if no group would miss its deadline.
        """
        began = sorted(version for version in self._untaken if version is not None and self._untaken[version])
        # Earliest deadline first: one comparison per deadline, over the groups with this deadline or an earlier one.
        all_live = all_ready = 0
        for version in began:
            all_live += self._untaken[version]
            all_ready += self._untaken_ready.get(version, 0)
            updates_left = max(0, version + self._max_staleness - self.version)
            excess = all_live - min(all_ready, self.batch_size) - updates_left * self.batch_size
            if excess > 0:
                return version, excess
        return None

    def list_oldest_ready(self) -> list[LiveGroup]:
        """Return the N oldest finished groups, sorted by launch order; launch order also breaks ties."""
        oldest = sorted(self._ready.values(), key=self._get_take_order)[: self.batch_size]
        # Sorted by launch order, which does not depend on time.
        return sorted(oldest, key=lambda live: live.launch_order)

    def list_certain_ready(self) -> list[LiveGroup]:
        """Return the finished groups that `list_oldest_ready` will contain when the step takes its groups.

        These groups are among the N oldest live groups. This cannot change: groups that are launched later are younger,
        and discarding a group only moves younger groups forward.
        """
        waiting = [live for live in self._live.values() if not live.is_taken]
        first = sorted(waiting, key=self._get_take_order)[: self.batch_size]
        return [live for live in first if live.finish_order is not None]

    def take(self, draw_id: int) -> LiveGroup:
        """Mark a finished group as taken for training, and return it; it stays live until the update is done."""
        live = self._live[draw_id]
        assert live.finish_order is not None and not live.is_taken, f"group {draw_id} cannot be taken"
        staleness = self.version - self._get_age_key(live)
        assert staleness <= self._max_staleness, f"group {draw_id} is {staleness} versions old"
        live.is_taken = True
        self.num_taken += 1
        self._subtract_from_counts(live)
        return live

    def pop_taken(self) -> list[LiveGroup]:
        """Remove and return all groups that were taken for training; called after their update."""
        done = [live for live in self._live.values() if live.is_taken]
        for live in done:
            del self._live[live.draw_id]
        self.num_taken = 0
        return done

    def list_overdue(self) -> list[LiveGroup]:
        """Return the groups that no step has taken yet and that are too old for the next update."""
        oldest = self.version - self._max_staleness
        return [
            live for live in self._live.values()
            if not live.is_taken and live.version is not None and live.version < oldest
        ]  # fmt: skip

    def _get_age_key(self, live: LiveGroup) -> int:
        # A finished group without a version has called no engine, so it has no old tokens.
        return self.version if live.version is None else live.version

    def _get_take_order(self, live: LiveGroup) -> tuple[int, int]:
        return (self._get_age_key(live), live.launch_order)

    def _subtract_from_counts(self, live: LiveGroup) -> None:
        self._adjust_count(self._untaken, live.version, -1)
        if live.finish_order is not None:
            del self._ready[live.draw_id]
            self._adjust_count(self._untaken_ready, live.version, -1)

    @staticmethod
    def _adjust_count(counts: dict[int | None, int], version: int | None, change: int) -> None:
        left = counts.get(version, 0) + change
        assert left >= 0, "a group was subtracted from the counts twice"
        if left:
            counts[version] = left
        else:
            counts.pop(version, None)
