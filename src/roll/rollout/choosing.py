"""What a synchronous round launches, and which finished groups close it.

    queue            N prompts; closes when all are done
    + redundancy     rN prompts; closes at N: the first launched (`launch_order`), or the first finished
    tail batching    short round: rN prompts x rR rollouts, closes at N complete prompts, leftovers are deferred;
                     long round, when N prompts are deferred: these, without redundancy (RollPacker, arXiv 2509.21009)

Near the end of a run a round launches no more than the rounds after it can still train: its redundancy shrinks, and
tail batching ends with rounds that begin with what is deferred. So, of D deferred prompts, with L rounds to come,

    D <= L N     before every round, and D = 0 after the last

holds from the start (D = 0) and is kept: a plain round takes min(D, N) of them, and any other draws at most as many new
spare prompts as leave D <= (L - 1) N. With quotas it holds in each domain, for the places that it will be dealt.

With α > 0 there are no rounds: the buffer's freshness rule alone decides.
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
"""Numbers of prompts; all under `None` where the mix of domains is free."""


@dataclass(kw_only=True, slots=True)
class Round:
    """One synchronous step's launch."""

    places: ByDomain
    """Groups that the step trains."""
    num_rollouts: int
    """Of each prompt."""
    first_finished: bool = False
    deferred: ByDomain = field(default_factory=dict)
    """Prompts that earlier rounds left, to begin with, and to wait for."""
    spare: ByDomain = field(default_factory=dict)
    """New prompts beyond those that the step trains."""
    spare_deferred: ByDomain = field(default_factory=dict)
    """Deferred ones beyond those that it waits for: without them the queue would grow wherever much is redundant."""
    kind: str = ""
    mandatory: set[int] = field(default_factory=set)
    """Draws that the round waits for, so that nothing is deferred twice."""

    @property
    def speculates(self) -> bool:
        """Whether more is launched than the step trains."""
        return any(self.spare.values()) or any(self.spare_deferred.values())

    @property
    def num_prompts(self) -> int:
        """Prompts that the step launches, spare ones included."""
        return sum(map(sum, (self.places.values(), self.spare.values(), self.spare_deferred.values())))


def next_round(
    config: SchedulingConfig, *, places: ByDomain, deferred: ByDomain, later: ByDomain | None, group_size: int
) -> Round:
    """Decide what to launch.

    Args:
        config: the policies.
        places: groups that the step trains; N in all.
        deferred: prompts that wait in the deferred queue.
        later: groups that the steps after this one train; `None` where nobody knows how many there will be.
        group_size: rollouts that a group needs, R.
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
    """Remove the first draws of each domain from the queue, so many of each; domain by domain."""
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
    """The groups that the step takes, or `None` while it has to wait.

    Args:
        buffer: live groups.
        current: what was launched.
        wanted: groups that the step trains.
        quota: groups of each domain; empty where the mix is free.
    """
    if not current.speculates:
        if len(buffer) == 0:
            return []
        return buffer.oldest_ready() if buffer.may_take() else None
    if not current.first_finished:
        return _launched_first(buffer, wanted, quota)
    if any(live.draw_id in current.mandatory for live in buffer.running):
        return None
    first = sorted(buffer.ready, key=lambda live: (live.draw_id not in current.mandatory, live.finished))
    taken = list(_within(first, wanted, quota))
    return sorted(taken, key=lambda live: live.order) if len(taken) == wanted or not buffer.running else None


def _launched_first(buffer: SampleBuffer, wanted: int, quota: Counter[str]) -> list[LiveGroup] | None:
    """The first that were launched, once nothing launched before the last of them still runs."""
    taken: list[LiveGroup] = []
    for live in _within((live for live in buffer if not live.taken), wanted, quota):
        if live.finished is None:
            return None
        taken.append(live)
    return taken


def _within(entries: Iterable[LiveGroup], wanted: int, quota: Counter[str]) -> Iterable[LiveGroup]:
    """The first `wanted` entries, of each domain no more than its quota."""
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
