"""SampleBuffer: the groups that are not yet trained, and which of them a step may take.

    admit ──► (start: policy version v) ──► finish ──► take ──► settle (trained)
                         └──────────────► discard (filtered, expired, aborted) ◄──┘

A group that began under policy version v may be trained by the update from version n to n + 1 iff n - v <= A, the
staleness bound; no token of it is older than v. So its deadline is the update at n = v + A, and each update takes N
groups. A take of N at version n is *admissible* iff afterwards every deadline can still be met:

    for j = 0 … A:   #{live groups with v <= n - A + j} - #{of these taken}  <=  j N         (earliest deadline first)

While at most N + ⌈αN⌉ groups wait to be taken, ⌈α⌉ = A, and at most A N of them while others are trained, an admissible
take always exists among the live groups, by induction: what remains with v <= n - A + j after the take at n, and for
j = A what began during that update as well, is what the take at n + 1 finds with v <= (n + 1) - A + (j - 1), at most
j N; and all that it finds are at most N + ⌈αN⌉ <= (1 + A) N. Whether one exists among the *finished* groups decides how
long to wait. Taking the oldest finished groups is admissible whenever any choice is, since it takes the most from every
prefix.
With A = 0 every live group must be finished: synchronous training.

Invariants:
    - a group is admitted once, and is then live until it is taken and settled, or discarded;
    - the number of live groups that nobody has taken never exceeds the limit that `admit` is given;
    - under `wait`, no group with n - v > A is ever taken, and none has to be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roll.rollout.group_run import GroupRun

__all__ = ["LiveGroup", "SampleBuffer"]


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group that is not yet trained."""

    run: GroupRun
    order: int
    """Of its launch."""
    version: int | None = None
    """Policy version under which its first rollout began; `None`: none has begun, so it can only get younger."""
    finished: int | None = None
    """Place in the order in which groups finished."""
    taken: bool = False

    @property
    def draw_id(self) -> int:
        """The id of the draw that it answers."""
        return self.run.draw.draw_id


class SampleBuffer:
    """Keeps live groups and their ages.

    Args:
        batch_size: groups per update, N.
        max_staleness: A.
        waits: whether a take must leave every deadline within reach; otherwise what misses its own is `overdue`.
    """

    def __init__(self, batch_size: int, max_staleness: int, *, waits: bool = True) -> None:
        self.version = 0
        """The trainer's policy version n."""
        self.num_taken = 0
        """Groups that are being trained."""
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
        """Live groups, in launch order."""
        return iter(self._live.values())

    def __getitem__(self, draw_id: int) -> LiveGroup:
        return self._live[draw_id]

    def __contains__(self, draw_id: int) -> bool:
        return draw_id in self._live

    @property
    def num_ready(self) -> int:
        """Finished groups that nobody has taken."""
        return len(self._ready)

    @property
    def ready(self) -> list[LiveGroup]:
        """Finished groups that nobody has taken, in the order in which they finished."""
        return list(self._ready.values())

    @property
    def running(self) -> list[LiveGroup]:
        """Groups that have not finished, in launch order."""
        return [live for live in self._live.values() if live.finished is None]

    def admit(self, run: GroupRun, limit: int) -> None:
        """A group is launched; `limit` bounds those that nobody has taken."""
        draw_id = run.draw.draw_id
        assert draw_id not in self._live, f"draw {draw_id} is admitted twice"
        waiting = len(self._live) - self.num_taken
        assert waiting < limit, f"{waiting} groups are live and not taken, the limit is {limit}"
        self._live[draw_id] = LiveGroup(run, self._num_admitted)
        self._num_admitted += 1
        self._count(self._untaken, None, 1)

    def start(self, draw_id: int) -> None:
        """Its first rollout begins, under the current version."""
        live = self._live.get(draw_id)
        if live is not None and live.version is None:
            self._count(self._untaken, None, -1)
            live.version = self.version
            self._count(self._untaken, live.version, 1)

    def finish(self, draw_id: int) -> None:
        """It has all its rollouts and rewards."""
        live = self._live[draw_id]
        assert live.finished is None, f"group {draw_id} finishes twice"
        live.finished = self._num_finished
        self._num_finished += 1
        self._ready[draw_id] = live
        self._count(self._untaken_ready, live.version, 1)

    def discard(self, draw_id: int) -> None:
        """It will not be trained."""
        live = self._live.pop(draw_id)
        assert not live.taken, f"group {draw_id} is being trained"
        self._forget(live)

    def may_take(self) -> bool:
        """Whether finished groups allow an admissible take of N (of all, where fewer are live)."""
        untaken = sum(self._untaken.values())
        if self.num_ready < min(self._batch_size, untaken) or not untaken:
            return False
        if not self._waits:
            return True
        began = sorted(version for version in self._untaken if version is not None and self._untaken[version])
        all_live = all_ready = 0
        for version in began:
            all_live += self._untaken[version]
            all_ready += self._untaken_ready.get(version, 0)
            updates_left = max(0, version + self._max_staleness - self.version)
            if all_live - min(all_ready, self._batch_size) > updates_left * self._batch_size:
                return False
        return True

    def oldest_ready(self) -> list[LiveGroup]:
        """What an update takes: the N oldest finished groups, of equals those launched first; in launch order."""
        found = sorted(self._ready.values(), key=lambda live: (self._age_key(live), live.order))[: self._batch_size]
        return sorted(found, key=lambda live: live.order)

    def take(self, draw_id: int) -> LiveGroup:
        """A finished group goes into training; it stays live until it is settled."""
        live = self._live[draw_id]
        assert live.finished is not None and not live.taken, f"group {draw_id} cannot be taken"
        staleness = self.version - self._age_key(live)
        assert staleness <= self._max_staleness, f"group {draw_id} is {staleness} versions old"
        live.taken = True
        self.num_taken += 1
        self._forget(live)
        return live

    def settle_taken(self) -> list[LiveGroup]:
        """The update is done: what was taken leaves the buffer."""
        done = [live for live in self._live.values() if live.taken]
        for live in done:
            del self._live[live.draw_id]
        self.num_taken = 0
        return done

    def overdue(self) -> list[LiveGroup]:
        """Groups that the update at the current version may not train any more."""
        oldest = self.version - self._max_staleness
        return [
            live for live in self._live.values()
            if not live.taken and live.version is not None and live.version < oldest
        ]  # fmt: skip

    def _age_key(self, live: LiveGroup) -> int:
        return self.version if live.version is None else live.version

    def _forget(self, live: LiveGroup) -> None:
        self._count(self._untaken, live.version, -1)
        if live.finished is not None:
            del self._ready[live.draw_id]
            self._count(self._untaken_ready, live.version, -1)

    @staticmethod
    def _count(counts: dict[int | None, int], version: int | None, change: int) -> None:
        left = counts.get(version, 0) + change
        assert left >= 0, "a group was counted out twice"
        if left:
            counts[version] = left
        else:
            counts.pop(version, None)
