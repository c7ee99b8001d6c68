"""Scheduling of synchronous rounds: the prompts that a round launches, and the finished groups that it trains.

    queue            N prompts; ends when all are done
    + redundancy     rN prompts; ends with N of them: the first launched (`launch_order`), or the first finished
    tail batching    short round: rN prompts x rR rollouts, ends with N complete prompts, the rest are deferred;
                     long round, when N prompts are deferred: these, without redundancy (RollPacker, arXiv 2509.21009)

Near the end of a run, a round launches no more prompts than the later rounds can still train: its redundancy decreases,
and the last rounds of tail batching start with the deferred prompts. So, with D deferred prompts and L rounds left,

    D <= L N     before every round, and D = 0 after the last

holds from the start (D = 0) and is an invariant: a plain round takes min(D, N) deferred prompts, and any other round
samples only as many new spare prompts as keep D <= (L - 1) N. With quotas this holds in each domain, for the training
slots that the domain will get.

With α > 0 there are no rounds: only the staleness bound of the buffer decides.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from roll.config.scheduling import SchedulingConfig
from roll.rollout.buffer import LiveGroup, SampleBuffer
from roll.types import PromptDraw

__all__ = ["CountsByDomain", "Round", "choose_groups", "list_guaranteed_groups", "plan_next_round", "pop_first_draws"]

CountsByDomain: TypeAlias = Mapping[str | None, int]
"""Number of prompts by domain; if the domain mix is not fixed, the only key is `None`."""


@dataclass(kw_only=True, slots=True)
class Round:
    """The prompts and rollouts that one synchronous step launches."""

    num_groups: CountsByDomain
    """Number of groups that the step trains, by domain."""
    num_rollouts: int
    """Number of rollouts per prompt."""
    first_finished: bool = False
    """True to train the groups that finish first, False to train the groups that were launched first."""
    deferred: CountsByDomain = field(default_factory=dict)
    """Number of deferred prompts that the round launches first and must finish."""
    spare: CountsByDomain = field(default_factory=dict)
    """Number of new prompts in addition to those that the step trains."""
    spare_deferred: CountsByDomain = field(default_factory=dict)
    """Number of spare prompts that come from the deferred queue, which would otherwise grow with high redundancy."""
    kind: str = ""
    """Type of round: `short`, `long` or `last` with tail batching, otherwise empty."""
    mandatory_draw_ids: set[int] = field(default_factory=set)
    """Ids of draws that the round must finish, so that no draw is deferred twice."""
    chosen: list[LiveGroup] | None = None
    """Groups of the batch while the batch is closed, which stops the other groups."""

    @contextmanager
    def close_with(self, chosen: list[LiveGroup]) -> Iterator[None]:
        """Store the groups of the batch that is closed in a `with` block."""
        self.chosen = chosen
        try:
            yield
        finally:
            self.chosen = None

    @property
    def is_speculative(self) -> bool:
        """True if more prompts are launched than the step trains on."""
        return any(self.spare.values()) or any(self.spare_deferred.values())

    @property
    def num_prompts(self) -> int:
        """Number of prompts that the step launches, including spare prompts."""
        return sum(map(sum, (self.num_groups.values(), self.spare.values(), self.spare_deferred.values())))


def plan_next_round(
    config: SchedulingConfig,
    *,
    num_groups: CountsByDomain,
    deferred: CountsByDomain,
    num_later_groups: CountsByDomain | None,
    group_size: int,
) -> Round:
    """Return the prompts and rollouts that the next round launches.

    Args:
        config: Scheduling policies.
        num_groups: Number of groups that the step trains on, by domain; N in total.
        deferred: Number of prompts in the deferred queue, by domain.
        num_later_groups: Number of groups that later steps train on, by domain; `None` if the number of steps is
            unknown.
        group_size: Rollouts per group, R.
    """
    num_wanted = sum(num_groups.values())
    first = {domain: min(deferred.get(domain, 0), count) for domain, count in num_groups.items()}
    plain = Round(num_groups=num_groups, num_rollouts=group_size, deferred=first)
    if config.type == "batch":
        return plain
    extra = config.compute_num_prompts(num_wanted) - num_wanted
    # Rounded up in each domain: otherwise a small domain would never get a spare prompt.
    spare = {domain: math.ceil(extra * count / num_wanted) for domain, count in num_groups.items()}
    redundant = Round(
        num_groups=num_groups,
        num_rollouts=config.compute_num_rollouts(group_size),
        first_finished=config.trains_first_finished,
        deferred=first,
        spare=spare,
    )
    if config.type == "tail_batching":
        # A long round needs enough deferred prompts, because new prompts would wait for their long answers.
        if all(deferred.get(domain, 0) >= count for domain, count in num_groups.items()):
            plain.kind = "long"
            return plain
        # The leftovers of a short round could be more prompts than the later rounds train.
        if num_later_groups is not None and any(
            deferred.get(d, 0) + spare[d] > num_later_groups.get(d, 0) for d in num_groups
        ):
            plain.kind = "last"
            return plain
        redundant.kind, redundant.deferred = "short", {}
        return redundant
    rest = {domain: deferred.get(domain, 0) - first[domain] for domain in num_groups}
    again = redundant.spare_deferred = {domain: min(rest[domain], spare[domain]) for domain in num_groups}
    redundant.spare = {domain: spare[domain] - again[domain] for domain in num_groups}
    if num_later_groups is not None and config.leftovers == "defer":
        bounds = {domain: max(0, num_later_groups.get(domain, 0) - rest[domain]) for domain in num_groups}
        redundant.spare = {domain: min(redundant.spare[domain], bounds[domain]) for domain in num_groups}
    return redundant


def pop_first_draws(
    deferred: deque[PromptDraw], counts: CountsByDomain, get_domain: Callable[[PromptDraw], str | None]
) -> list[PromptDraw]:
    """Remove the first `counts[domain]` draws of each domain from the queue; return them in the order of `counts`."""
    taken: dict[str | None, list[PromptDraw]] = {domain: [] for domain in counts}
    for _ in range(len(deferred)):
        draw = deferred.popleft()
        domain = get_domain(draw)
        if len(taken.get(domain, ())) < counts.get(domain, 0):
            taken[domain].append(draw)
        else:
            deferred.append(draw)
    return [draw for draws in taken.values() for draw in draws]


def choose_groups(buffer: SampleBuffer, current: Round, num_wanted: int, quota: Counter[str]) -> list[LiveGroup] | None:
    """Return the groups that the step trains on; `None` if it has to wait until more groups have finished.

    Args:
        buffer: Live groups.
        current: The current round.
        num_wanted: Number of groups that the step trains on.
        quota: Number of groups of each domain; empty if the domain mix is not fixed.
    """
    if not current.is_speculative:
        if len(buffer) == 0:
            return []
        return buffer.list_oldest_ready() if buffer.can_take() else None
    if not current.first_finished:
        return _pick_first_launched(buffer, num_wanted, quota)
    # The step waits for deferred prompts, however long: a prompt that is deferred again and again would never train.
    if any(live.draw_id in current.mandatory_draw_ids for live in buffer.running_groups):
        return None
    first = sorted(
        buffer.ready_groups, key=lambda live: (live.draw_id not in current.mandatory_draw_ids, live.finish_order)
    )
    taken = list(_take_within_quotas(first, num_wanted, quota))
    return (
        sorted(taken, key=lambda live: live.launch_order)
        if len(taken) == num_wanted or not buffer.running_groups
        else None
    )


def list_guaranteed_groups(
    buffer: SampleBuffer, current: Round, num_wanted: int, quota: Counter[str]
) -> list[LiveGroup]:
    """Return the finished groups that `choose_groups` will choose for this step, regardless of the other groups.

    Later events only remove groups that a filter rejects, or append groups, so a guaranteed group stays guaranteed. For
    the arguments, see `choose_groups`.
    """
    if current.chosen is not None:  # groups that finish now are not in the batch, even if they are older
        return current.chosen
    if not current.is_speculative:
        return sorted(buffer.list_certain_ready(), key=lambda live: live.launch_order)
    if current.first_finished:
        mandatory = [live for live in buffer if not live.is_taken and live.draw_id in current.mandatory_draw_ids]
        others = [live for live in buffer.ready_groups if live.draw_id not in current.mandatory_draw_ids]
        order = [*mandatory, *others]
    else:
        order = [live for live in buffer if not live.is_taken]
    return [live for live in _take_within_quotas(order, num_wanted, quota) if live.finish_order is not None]


def _pick_first_launched(buffer: SampleBuffer, num_wanted: int, quota: Counter[str]) -> list[LiveGroup] | None:
    """Return the first `num_wanted` groups in launch order, within quotas; `None` if one of them has not finished."""
    taken: list[LiveGroup] = []
    for live in _take_within_quotas((live for live in buffer if not live.is_taken), num_wanted, quota):
        if live.finish_order is None:
            return None
        taken.append(live)
    return taken


def _take_within_quotas(entries: Iterable[LiveGroup], num_wanted: int, quota: Counter[str]) -> Iterable[LiveGroup]:
    """Yield up to `num_wanted` groups in order, at most `quota[domain]` per domain; an empty `quota` means no limit."""
    left = Counter(quota)
    count = 0
    for live in entries:
        domain = live.run.draw.prompt.domain
        if count == num_wanted:
            return
        if quota and not left[domain]:
            continue
        left[domain] -= 1
        count += 1
        yield live
