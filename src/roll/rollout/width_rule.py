"""The rule that chooses the engines' width from step to step: the number of devices over which one engine is sharded.

    what a step shows                                                              width of the next step
    ──────────────────────────────────────────────────────────────────────────────────────────────────────
    more than 1.05 x the preemptions of the previous step                          the next larger one
    requests of the mean context length do not fit into the KV caches together     the next larger one
    no preemption in four consecutive steps, and the requests fit at that width    the next smaller one

A wide engine stores the weights once for several devices, so the devices have more room for KV caches, and fewer
requests are preempted and computed again. A narrow engine needs fewer collectives. The first and the third row are the
rule of RollPacker (arXiv 2509.21009, section 4.2). The mean context length is the criterion of EARL (arXiv 2510.05943),
which changes the width before requests are preempted, as contexts grow during a run. A run and the simulator call the
same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["StepLoad", "WidthCapacity", "WidthState", "fits"]

GROWTH = 1.05
"""Factor by which preemptions must grow from one step to the next for the width to increase."""
NUM_CLEAN_STEPS = 4
"""Number of consecutive steps without preemptions after which the width decreases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLoad:
    """The load of the engines in one step."""

    num_preempted: int
    """Number of times that an engine removed a running request from its KV cache, over all engines."""
    mean_context: float
    """Mean number of tokens of a rollout, including its prompt."""
    num_requests: int
    """Number of requests that run at once, if the engines have slots for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthCapacity:
    """The total capacity of all engines of one width."""

    num_slots: int
    """Number of requests."""
    kv_tokens: int | None
    """Number of tokens in the KV caches; `None` if unknown."""


def fits(load: StepLoad, capacity: WidthCapacity | None) -> bool:
    """Return whether all requests that run at once fit into the KV caches, if each has the mean context length; also
    return True if the capacity is unknown.
    """
    if capacity is None or capacity.kv_tokens is None:
        return True
    return min(load.num_requests, capacity.num_slots) * load.mean_context <= capacity.kv_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthState:
    """The width for one type of round, and the measurements that decide when it changes."""

    width: int
    num_preempted: int | None = None
    """Number of preemptions in the previous step; `None` before the first step."""
    num_clean: int = 0
    """Number of steps without preemptions since the width changed or a request was preempted."""
    reason: str = ""
    """The measurement for which the width changed last; empty if it has not changed."""

    def record_step(self, load: StepLoad, widths: Sequence[int], capacities: Mapping[int, WidthCapacity]) -> WidthState:
        """Return the state after a step at this width.

        Args:
            load: The load of the step.
            widths: All widths, ascending.
            capacities: The capacity of the engines by width; a width may be missing.
        """
        place = widths.index(self.width)
        wider, narrower = widths[place + 1 : place + 2], widths[max(place - 1, 0) : place]
        grows = self.num_preempted is not None and load.num_preempted > GROWTH * self.num_preempted
        num_clean = 0 if load.num_preempted else self.num_clean + 1
        state = replace(self, num_preempted=load.num_preempted, num_clean=num_clean)
        if wider and grows:
            reason = f"a step had {load.num_preempted:,} preemptions, the previous one {self.num_preempted:,}"
            return replace(state, width=wider[0], num_clean=0, reason=reason)
        if wider and not fits(load, capacity := capacities.get(self.width)):
            assert capacity is not None, "an unknown capacity fits"
            reason = (
                f"{min(load.num_requests, capacity.num_slots):,} requests of {load.mean_context:,.0f} tokens on "
                f"average do not fit into KV caches of {capacity.kv_tokens:,} tokens"
            )
            return replace(state, width=wider[0], num_clean=0, reason=reason)
        if narrower and num_clean >= NUM_CLEAN_STEPS and fits(load, capacities.get(narrower[0])):
            reason = f"{num_clean} consecutive steps had no preemption"
            return replace(state, width=narrower[0], num_clean=0, reason=reason)
        return state
