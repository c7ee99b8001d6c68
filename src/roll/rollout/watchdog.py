"""Report why a run has stalled: the stage, the engine, the rollouts, and the duration.

It only observes. A rollout that waits for the rest of its group does not block a step, but a rollout that waits for an
engine, a token or a reward does. If there is no such rollout, the watchdog reports the current phases of the run, such
as an update or a weight sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roll.rollout.lifecycle import LifeCycle, LiveRollout, RolloutState
from roll.types import RolloutId

__all__ = ["Stall", "Watchdog", "find_stalls"]

MAX_LISTED_ROLLOUTS = 5
STAGE_DESCRIPTIONS = {
    RolloutState.QUEUED: "wait for an engine",
    RolloutState.GENERATING: "are being generated",
    RolloutState.REWARDING: "wait for their reward",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Rollouts that have been in one stage for too long."""

    stage: RolloutState
    rollouts: tuple[tuple[RolloutId, float], ...]
    """Rollouts and the seconds that they have been in this stage, longest first."""
    workers: tuple[str, ...]
    """Engines that generate the rollouts; empty in other stages."""

    def __str__(self) -> str:
        named = ", ".join(f"{name} ({age:.0f} s)" for name, age in self.rollouts[:MAX_LISTED_ROLLOUTS])
        more = len(self.rollouts) - MAX_LISTED_ROLLOUTS
        where = f" at {', '.join(self.workers)}" if self.workers else ""
        return f"{len(self.rollouts)} rollouts {STAGE_DESCRIPTIONS[self.stage]}{where}: {named}" + (
            f", and {more} more" if more > 0 else ""
        )


def find_stalls(lifecycle: LifeCycle, now: float, stall_s: float) -> list[Stall]:
    """Return the rollouts that have been in one stage for at least `stall_s` seconds, by stage.

    The list is empty if any rollout has changed its state in the last `stall_s` seconds.
    """
    if now - lifecycle.last_move < stall_s:
        return []
    found: dict[RolloutState, list[LiveRollout]] = {}
    for rollout in lifecycle:
        if rollout.state in STAGE_DESCRIPTIONS and now - rollout.entered_at >= stall_s:
            found.setdefault(rollout.state, []).append(rollout)
    return [
        Stall(
            stage=stage,
            rollouts=tuple(
                (r.rollout_id, now - r.entered_at) for r in sorted(found[stage], key=lambda r: r.entered_at)
            ),
            workers=tuple(sorted({r.detail for r in found[stage] if stage is RolloutState.GENERATING and r.detail})),
        )
        for stage in STAGE_DESCRIPTIONS
        if stage in found
    ]


@dataclass(eq=False)
class Watchdog:
    """Checks periodically whether the run is stalled, and reports stalls."""

    lifecycle: LifeCycle
    """State of every rollout."""
    stall_s: float
    """Time without a transition after which a stall is reported, in seconds; doubles after each report."""
    report: Callable[[str], None]
    """Called with a description of the stall."""
    get_phases: Callable[[], Mapping[str, float]] = dict
    """Returns the current phases of the run, and the seconds since each began."""

    async def watch(self) -> None:
        """Check periodically until canceled, and report stalls."""
        loop = asyncio.get_running_loop()
        patience, began, reported_move = self.stall_s, loop.time(), -1.0
        while True:
            last_move = self.lifecycle.last_move
            if last_move != reported_move:
                patience = self.stall_s
            missing = max(last_move, began) + patience - loop.time()
            if missing > 0:
                await asyncio.sleep(min(missing, self.stall_s))
                continue
            stalls = [str(stall) for stall in find_stalls(self.lifecycle, loop.time(), patience)]
            if not stalls:  # no rollout is in progress, as during a long update
                stalls = [
                    f"the run has been in {name} for {s:.0f} s"
                    for name, s in self.get_phases().items()
                    if s >= patience
                ]
            if stalls:
                self.report(
                    f"no rollout has changed its state for {loop.time() - max(last_move, began):.0f} s: "
                    + "; ".join(stalls)
                )
                reported_move = last_move
                patience *= 2
            else:
                await asyncio.sleep(self.stall_s)
