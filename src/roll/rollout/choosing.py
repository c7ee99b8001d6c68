"""Which prompts a synchronous round launches, and which finished groups close it.

    queue            N prompts; closes when all are done
    + redundancy     rN prompts; closes at N: the first launched (`launch_order`), or the first finished
    tail batching    short round: rN prompts x rR rollouts, closes at N complete prompts, leftovers are deferred;
                     long round, when N prompts are deferred: these, without redundancy (RollPacker, arXiv 2509.21009)

Near the end of a run a round launches no more prompts than the later rounds can still train: its redundancy shrinks,
and tail batching ends with rounds that begin with the deferred prompts. So, with D deferred prompts and L rounds left,

    D <= L N     before every round, and D = 0 after the last

holds from the start (D = 0) and is an invariant: a plain round takes min(D, N) deferred prompts, and any other round
draws only as many new spare prompts as leave D <= (L - 1) N. With quotas it holds in each domain, for the places that
the domain will be dealt.

With α > 0 there are no rounds: the buffer's staleness rule alone decides.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from roll.config.scheduling import SchedulingConfig
from roll.rollout.buffer import LiveGroup, SampleBuffer
from roll.types import PromptDraw

__all__ = ["ByDomain", "Round", "choose", "next_round", "take_first"]

ByDomain: TypeAlias = Mapping[str | None, int]
"""Number of prompts by domain; the only key is `None` if the domain mix is free."""


@dataclass(kw_only=True, slots=True)
class Round:
    """The launch of one synchronous step."""

    places: ByDomain
    """Groups that the step trains."""
    num_rollouts: int
    """Rollouts per prompt."""
    first_finished: bool = False
    deferred: ByDomain = field(default_factory=dict)
    """Deferred prompts that the round begins with and waits for."""
    spare: ByDomain = field(default_factory=dict)
    """New prompts beyond those that the step trains."""
    spare_deferred: ByDomain = field(default_factory=dict)
    """Deferred prompts beyond those that it waits for: without them the queue would grow under high redundancy."""
    kind: str = ""
    mandatory: set[int] = field(default_factory=set)
    """Draw ids that the round waits for, so that no draw is deferred twice."""

    @property
    def speculates(self) -> bool:
        """Whether more prompts are launched than the step trains."""
        return any(self.spare.values()) or any(self.spare_deferred.values())

    @property
    def num_prompts(self) -> int:
        """Number of prompts that the step launches, including spare ones."""
        return sum(map(sum, (self.places.values(), self.spare.values(), self.spare_deferred.values())))


def next_round(
    config: SchedulingConfig, *, places: ByDomain, deferred: ByDomain, later: ByDomain | None, group_size: int
) -> Round:
    """Decide which prompts to launch.

    Args:
        config: Scheduling policies.
        places: Groups that the step trains; N in total.
        deferred: Prompts in the deferred queue.
        later: Groups that later steps train; `None` if the number of steps is unknown.
        group_size: Rollouts that a group needs, R.
    """
    wanted = sum(places.values())
    first = {domain: min(deferred.get(domain, 0), count) for domain, count in places.items()}
    plain = Round(places=places, num_rollouts=group_size, deferred=first)
    if config.type == "batch":
        return plain
    extra = config.num_prompts(wanted) - wanted
    spare = {domain: math.ceil(extra * count / wanted) for domain, count in places.items()}
    redundant = Round(
        places=places,
        num_rollouts=config.num_rollouts(group_size),
        first_finished=config.first_finished,
        deferred=first,
        spare=spare,
    )
    if config.type == "tail_batching":
        if all(deferred.get(domain, 0) >= count for domain, count in places.items()):
            plain.kind = "long"
            return plain
        if later is not None and any(deferred.get(d, 0) + spare[d] > later.get(d, 0) for d in places):
            plain.kind = "last"
            return plain
        redundant.kind, redundant.deferred = "short", {}
        return redundant
    rest = {domain: deferred.get(domain, 0) - first[domain] for domain in places}
    again = redundant.spare_deferred = {domain: min(rest[domain], spare[domain]) for domain in places}
    redundant.spare = {domain: spare[domain] - again[domain] for domain in places}
    if later is not None and config.leftovers == "defer":
        bounds = {domain: max(0, later.get(domain, 0) - rest[domain]) for domain in places}
        redundant.spare = {domain: min(redundant.spare[domain], bounds[domain]) for domain in places}
    return redundant


def take_first(
    deferred: deque[PromptDraw], counts: ByDomain, domain_of: Callable[[PromptDraw], str | None]
) -> list[PromptDraw]:
    """Remove and return the first `counts` draws of each domain from the queue, domain by domain."""
    found: dict[str | None, list[PromptDraw]] = {domain: [] for domain in counts}
    for _ in range(len(deferred)):
        draw = deferred.popleft()
        domain = domain_of(draw)
        if len(found.get(domain, ())) < counts.get(domain, 0):
            found[domain].append(draw)
        else:
            deferred.append(draw)
    return [draw for draws in found.values() for draw in draws]


def choose(buffer: SampleBuffer, current: Round, wanted: int, quota: Counter[str]) -> list[LiveGroup] | None:
    """Return the groups that the step takes, or `None` while it has to wait.

    Args:
        buffer: Live groups.
        current: The launch of this round.
        wanted: Number of groups that the step trains.
        quota: Number of groups of each domain; empty if the domain mix is free.
    """
    if not current.speculates:
        if len(buffer) == 0:
            return []
        return buffer.oldest_ready() if buffer.may_take() else None
    if not current.first_finished:
        return _first_launched(buffer, wanted, quota)
    if any(live.draw_id in current.mandatory for live in buffer.running):
        return None
    first = sorted(buffer.ready, key=lambda live: (live.draw_id not in current.mandatory, live.finished))
    taken = list(_within_quotas(first, wanted, quota))
    return sorted(taken, key=lambda live: live.order) if len(taken) == wanted or not buffer.running else None


def _first_launched(buffer: SampleBuffer, wanted: int, quota: Counter[str]) -> list[LiveGroup] | None:
    """Return the first `wanted` groups in launch order, or `None` while one of them still runs."""
    taken: list[LiveGroup] = []
    for live in _within_quotas((live for live in buffer if not live.taken), wanted, quota):
        if live.finished is None:
            return None
        taken.append(live)
    return taken


def _within_quotas(entries: Iterable[LiveGroup], wanted: int, quota: Counter[str]) -> Iterable[LiveGroup]:
    """Yield the first `wanted` groups, at most the quota of each domain."""
    left = Counter(quota)
    count = 0
    for live in entries:
        domain = live.run.draw.prompt.domain
        if count == wanted:
            return
        if quota and not left[domain]:
            continue
        left[domain] -= 1
        count += 1
        yield live
