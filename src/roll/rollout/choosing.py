"""What a synchronous round launches, and which finished groups close it.

    queue            N prompts; closes when all are done
    + redundancy     rN prompts; closes at N: the first launched (`launch_order`), or the first finished
    tail batching    short round: rN prompts x rR rollouts, closes at N complete prompts, leftovers are deferred;
                     long round, when N prompts are deferred: these, without redundancy (RollPacker, arXiv 2509.21009,
                     section 3)

What is deferred are the slowest prompts, and a run that ends must not leave them out. With b steps left, this one
included, and D prompts deferred, a round therefore draws at most bN - D fresh ones; then D <= bN before every round
implies D <= (b - 1)N after it, which N prompts leave. So the last rounds speculate less, and the last one trains
all that is deferred. With quotas, the same holds for each domain with its own places instead of N.

With α > 0 there are no rounds: the buffer's freshness rule alone decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roll.config.scheduling import SchedulingConfig
from roll.rollout.buffer import Live, SampleBuffer
from roll.types import PromptDraw

__all__ = ["Places", "Round", "choose", "deal_out", "divide", "next_round"]


@dataclass(kw_only=True, slots=True)
class Round:
    """One synchronous step's launch."""

    num_prompts: int
    num_rollouts: int
    """Of each prompt."""
    first_finished: bool
    num_deferred: int = 0
    """Prompts that earlier rounds left, if it begins with them."""
    kind: str = ""
    mandatory: set[int] = field(default_factory=set)
    """Draws that the round waits for, so that nothing is deferred twice."""

    def speculates(self, wanted: int) -> bool:
        """Whether more was launched than the step trains."""
        return self.num_prompts > wanted


def next_round(
    config: SchedulingConfig, *, wanted: int, group_size: int, num_deferred: int, is_last: bool = False
) -> Round:
    """Decide what to launch.

    Args:
        config: the policies.
        wanted: groups that the step trains, N.
        group_size: rollouts that a group needs, R.
        num_deferred: prompts that wait in the deferred queue.
        is_last: no step follows.
    """
    plain = Round(num_prompts=wanted, num_rollouts=group_size, first_finished=False, num_deferred=num_deferred)
    if config.type == "batch":
        return plain
    if config.type == "tail_batching":
        if num_deferred >= wanted or is_last:
            plain.kind = "long"
            return plain
        plain.kind, plain.num_deferred = "short", 0
    plain.num_prompts = config.num_prompts(wanted)
    plain.num_rollouts = config.num_rollouts(group_size)
    plain.first_finished = config.first_finished
    return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What a round launches, of one domain or of all."""

    again: int
    """Deferred draws that it waits for."""
    spare: int
    """Deferred draws that it need not wait for."""
    fresh: int
    """New draws."""


def divide(current: Round, *, wanted: int, extra: int, num_deferred: int, due: int | None) -> Places:
    """Fill a round's places.

    Args:
        current: the round.
        wanted: groups that the step trains.
        extra: redundant ones.
        num_deferred: draws that wait.
        due: groups that this step and those after it train, where nothing may be left at the end; `None`: no bound.
    """
    room = wanted + extra if due is None else max(0, due - num_deferred)
    again = min(num_deferred, wanted if current.num_deferred else max(0, wanted - room))
    spare = min(num_deferred - again, extra) if current.num_deferred else 0
    return Places(again=again, spare=spare, fresh=min(room, wanted + extra - again - spare))


def deal_out(
    current: Round,
    deferred: Collection[PromptDraw],
    wanted: Mapping[str | None, int],
    extra: float,
    dues: Mapping[str | None, int | None],
    draw: Callable[[int, str | None], Sequence[PromptDraw]],
) -> tuple[list[PromptDraw], list[PromptDraw]]:
    """The draws of a round: those that it waits for, and the others.

    Args:
        current: the round.
        deferred: draws that wait, longest first.
        wanted: groups that the step trains, by domain; `None`: whatever their domain.
        extra: redundant ones, for each that is wanted.
        dues: as in `divide`, by domain.
        draw: makes fresh ones.
    """
    again: list[PromptDraw] = []
    others: list[PromptDraw] = []
    for domain, count in wanted.items():
        waiting = [entry for entry in deferred if domain in (None, entry.prompt.domain)]
        more = math.ceil(round(extra * count, 9))
        places = divide(current, wanted=count, extra=more, num_deferred=len(waiting), due=dues[domain])
        again += waiting[: places.again]
        others += waiting[places.again : places.again + places.spare]
        others += draw(places.fresh, domain)
    return again, others


def choose(buffer: SampleBuffer, current: Round, wanted: int, quota: Counter[str]) -> list[Live] | None:
    """The groups that the step takes, or `None` while it has to wait.

    Args:
        buffer: live groups.
        current: what was launched.
        wanted: groups that the step trains.
        quota: groups of each domain; empty where the mix is free.
    """
    if not current.speculates(wanted):
        if len(buffer) == 0:
            return []
        return buffer.oldest_ready() if buffer.may_take() else None
    if not current.first_finished:
        return _launched_first(buffer, wanted, quota)
    if any(live.draw_id in current.mandatory for live in buffer.running):
        return None
    first = sorted(buffer.ready, key=lambda live: (live.draw_id not in current.mandatory, live.finished))
    taken = list(_within(first, wanted, quota))
    return _in_launch_order(taken) if len(taken) == wanted or not buffer.running else None


def _launched_first(buffer: SampleBuffer, wanted: int, quota: Counter[str]) -> list[Live] | None:
    """The first that were launched, once nothing launched before the last of them still runs."""
    taken: list[Live] = []
    for live in _within((live for live in buffer if not live.taken), wanted, quota):
        if live.finished is None:
            return None
        taken.append(live)
    return taken


def _within(entries: Iterable[Live], wanted: int, quota: Counter[str]) -> Iterable[Live]:
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


def _in_launch_order(entries: list[Live]) -> list[Live]:
    return sorted(entries, key=lambda live: live.order)
