"""Who looks on as rollouts come about: the trace, and those who say what fails and what a step waits for."""

from __future__ import annotations

from contextlib import AsyncExitStack

from roll.config.pipelines.rlvr import RLVRConfig
from roll.envs.watch import watched
from roll.pipelines.learning.failures import Retries
from roll.rollout import RolloutScheduler
from roll.rollout.lifecycle import FINAL
from roll.tracking import Tracker
from roll.tracking.rollout_trace import RolloutTrace
from roll.tracking.stages import Stages

__all__ = ["watch"]


def watch(
    config: RLVRConfig, scheduler: RolloutScheduler, tracker: Tracker, stack: AsyncExitStack
) -> tuple[Retries, Stages]:
    """Let them listen to the scheduler's life cycle, and to environments until `stack` is closed."""
    retries, stages = Retries(), Stages(tracker.spans)
    listeners = [retries.on_transition, stages.on_transition]
    if config.tracking.trace_rollouts:
        listeners.append(RolloutTrace(tracker.spans.event, FINAL).on_transition)
    for listener in listeners:
        scheduler.life.listen(listener)
    stack.enter_context(watched(stages.environment))
    return retries, stages
