"""Staleness bound of asynchronous runs: `SampleBuffer` holds untrained groups and decides which a step may take.

    admit ──► (start: policy version v) ──► finish ──► take ──► pop_taken (trained)
                         └──────────────► discard (filtered, expired, aborted) ◄──┘

A group that began under policy version v may be trained by the update from version n to n + 1 iff n - v <= A, the
staleness bound; no token of the group is older than v. So the group's deadline is the update at n = v + A, and each
update takes N groups. A take of N at version n is *admissible* iff afterwards every deadline can still be met:

    for j = 0 … A:   #{live groups with v <= n - A + j} - #{of these taken}  <=  j N         (earliest deadline first)

While at most N + ⌈αN⌉ groups wait to be taken, ⌈α⌉ = A, and at most A N of them while others are trained, an admissible
take always exists among the live groups. Proof by induction: the groups with v <= n - A + j that remain after the take
at n, including for j = A the groups that began during that update, are the groups that the take at n + 1 finds with
v <= (n + 1) - A + (j - 1), at most j N; in total it finds at most N + ⌈αN⌉ <= (1 + A) N groups. Whether an admissible
take exists among the *finished* groups decides how long to wait. Taking the oldest finished groups is admissible
whenever any choice is, since it takes the most from every prefix.
With A = 0 every live group must be finished: synchronous training.

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
    """A group that was launched and is not trained yet."""

    run: GroupRun
    launch_order: int
    """Index in launch order."""
    version: int | None = None
    """Policy version under which the first rollout began; `None` if none has begun, so the group does not age yet."""
    finish_order: int | None = None
    """Index in the order in which groups finished; `None` if the group has not finished."""
    taken: bool = False

    @property
    def draw_id(self) -> int:
        """Id of the group's draw."""
        return self.run.draw.draw_id


class SampleBuffer:
    """Holds the live groups, which were launched and are not trained yet, and decides which groups a step may take.

    Args:
        batch_size: Groups per update, N.
        max_staleness: Staleness bound A.
        waits: Whether `can_take` also requires that, after this step, every remaining group can still be trained
            within the staleness bound. If False, groups may become too old for training: see `list_overdue`.
    """

    def __init__(self, batch_size: int, max_staleness: int, *, waits: bool = True) -> None:
        self.version = 0
        """The trainer's policy version n."""
        self.num_taken = 0
        """Number of groups that are being trained."""
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._waits = waits
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
    def ready_groups(self) -> list[LiveGroup]:
        """Finished groups that no step has taken yet, in the order in which they finished."""
        return list(self._ready.values())

    @property
    def running_groups(self) -> list[LiveGroup]:
        """Groups that have not finished, in launch order."""
        return [live for live in self._live.values() if live.finish_order is None]

    def admit(self, run: GroupRun, limit: int) -> None:
        """Add a launched group; including it, at most `limit` live groups may be waiting for a step to take them."""
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
        """Remove a group that will not be trained."""
        live = self._live.pop(draw_id)
        assert not live.taken, f"group {draw_id} is being trained"
        self._subtract_from_counts(live)

    def can_take(self) -> bool:
        """Return whether the step can take its groups: N groups, or all if there are fewer, have finished.

        With `waits`, it must also be possible to train every other group in time after this step.
        """
        untaken = sum(self._untaken.values())
        if self.num_ready < min(self._batch_size, untaken) or not untaken:
            return False
        if not self._waits:
            return True
        began = sorted(version for version in self._untaken if version is not None and self._untaken[version])
        # Earliest deadline first: one comparison per deadline, over the groups with this deadline or an earlier one.
        all_live = all_ready = 0
        for version in began:
            all_live += self._untaken[version]
            all_ready += self._untaken_ready.get(version, 0)
            updates_left = max(0, version + self._max_staleness - self.version)
            if all_live - min(all_ready, self._batch_size) > updates_left * self._batch_size:
                return False
        return True

    def list_oldest_ready(self) -> list[LiveGroup]:
        """Return the N oldest finished groups (of equally old ones, those launched first), sorted by launch order."""
        by_age = sorted(self._ready.values(), key=lambda live: (self._get_age_key(live), live.launch_order))
        oldest = by_age[: self._batch_size]
        # Sorted by launch order, which does not depend on time.
        return sorted(oldest, key=lambda live: live.launch_order)

    def take(self, draw_id: int) -> LiveGroup:
        """Mark a finished group as taken for training, and return it; it stays live until the update is done."""
        live = self._live[draw_id]
        assert live.finish_order is not None and not live.taken, f"group {draw_id} cannot be taken"
        staleness = self.version - self._get_age_key(live)
        assert staleness <= self._max_staleness, f"group {draw_id} is {staleness} versions old"
        live.taken = True
        self.num_taken += 1
        self._subtract_from_counts(live)
        return live

    def pop_taken(self) -> list[LiveGroup]:
        """Remove and return all groups that were taken for training; called after their update."""
        done = [live for live in self._live.values() if live.taken]
        for live in done:
            del self._live[live.draw_id]
        self.num_taken = 0
        return done

    def list_overdue(self) -> list[LiveGroup]:
        """Return the groups that no step has taken yet and that are too old for the next update."""
        oldest = self.version - self._max_staleness
        return [
            live for live in self._live.values()
            if not live.taken and live.version is not None and live.version < oldest
        ]  # fmt: skip

    def _get_age_key(self, live: LiveGroup) -> int:
        # A finished group without a version has called no engine, so it has no old tokens.
        return self.version if live.version is None else live.version

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
