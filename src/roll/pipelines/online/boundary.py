"""The end of a step: every draw has its fate, what is in flight is noted, and the run may be saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from roll.algorithms.hacking import BASELINE_STEPS, hacking_metrics
from roll.pipelines import measures
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.failures import step_alarms
from roll.pipelines.learning.state import LearningState
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.run import Run, whole_run
from roll.rollout import Batch, DataLedger
from roll.rollout.watchdog import Watchdog
from roll.tracking.rollout_trace import trace_engine_steps
from roll.types import Fate, Rollout, RolloutId

__all__ = ["batch_figures", "cross_boundary", "decided", "evaluate_if_due", "running", "settle"]

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(run: Run[LearningState], live: LivePolicy, stall_s: float) -> AsyncIterator[None]:
    """Around all steps of a live policy: its engines have its weights, and however it ends, what can be saved is.

    Args:
        run: at a boundary.
        live: its engines.
        stall_s: after so many seconds in which no rollout moved, a warning says what is waited for.
    """
    dog = Watchdog(live.generation.scheduler.life, stall_s, logger.warning, run.spans.under_way)
    watchdog = asyncio.create_task(dog.watch(), name="watchdog")
    try:
        async with whole_run(run, live.close):
            run.tracker.note("bringing the weights to the engines")
            await live.sync(run)
            yield
    finally:
        watchdog.cancel()


def decided(batch: Batch) -> dict[int, tuple[Fate, str]]:
    """By draw id, the fates of a batch's groups that were stopped before their end, and of draws that were given up."""
    left_out = {draw_id: (Fate.FILTERED, why) for draw_id, why in batch.left_out.items()}
    return left_out | {draw_id: (Fate.EXPIRED, why) for draw_id, why in batch.expired.items()}


def settle(ledger: DataLedger, fates: Mapping[int, tuple[Fate, str]], step: int) -> None:
    """Write every group's fate into the ledger."""
    for draw_id, (fate, why) in fates.items():
        ledger.settle(draw_id, fate, step, why)


async def batch_figures(state: LearningState, batch: Batch, fates: Mapping[int, tuple[Fate, str]]) -> dict[str, float]:
    """Of a step's rollouts, of how their batch came about, and of what became of its draws; marks of hacking, too."""
    metrics = measures.rollout_metrics(batch.groups) | measures.fate_metrics(fates) | measures.batch_metrics(batch)
    found = await asyncio.to_thread(hacking_metrics, batch.groups, list(state.first_lengths))  # seconds, if many
    return metrics | found


async def cross_boundary(
    online: OnlineRun[Any],
    batch: Batch,
    fates: Mapping[int, tuple[Fate, str]],
    trained: Collection[RolloutId],
    metrics: dict[str, float],
    demonstrations: Sequence[Rollout] = (),
) -> list[str]:
    """The step is done: everything gets its fate, and the run may be saved; returns alarms that stop the run.

    Args:
        online: whose weights have moved, and are in the engines.
        batch: of the step.
        fates: of all its draws.
        trained: the rollouts that were learnt from.
        metrics: of the step so far; more are added.
        demonstrations: that belong to the batch.
    """
    run, live, limits = online.run, online.live, online.config.alarms
    state = run.state
    run.mid_update = True
    state.step += 1
    settle(run.ledger, fates, state.step)
    if "reward/mean" in metrics:  # something was answered
        state.first_lengths = [*state.first_lengths, metrics["rollout/length_mean"]][:BASELINE_STEPS]
    await online.batches.settle(state.policy_version, trained)
    _mark(online)
    run.mid_update = False
    state.alarms, alarms = check_alarms(limits, metrics, state.alarms)
    alarms += step_alarms(limits, state, batch.groups, first=state.step == run.began_at + 1)
    metrics |= measures.run_metrics(state, run.ledger, online.engine_counts())
    metrics |= live.generation.metrics() if live else {"rollout/retries": 0.0}
    for alarm in alarms:
        logger.warning("%s", alarm.message)
    with run.spans.phase("record"):
        if online.recorder is not None:
            await online.recorder.record(state, batch, demonstrations)
        if live is not None:
            trace_engine_steps(live.generation.proxy.engines, run.spans.event)
        run.tracker.log_step(state.step, metrics | run.spans.metrics())
    return [alarm.message for alarm in alarms if alarm.stops]


def _mark(online: OnlineRun[Any]) -> None:
    """Note what was drawn, and what of it is in flight, so that a resumed run launches exactly that again."""
    state, stream = online.run.state, online.run.stream
    state.data = stream.state()
    state.num_draws = stream.num_drawn
    state.pending = [[d.draw_id, d.prompt.domain, d.position] for d in online.batches.in_flight()]
    _remember_verifiers(online)


async def evaluate_if_due(online: OnlineRun[Any], evaluator: Evaluator) -> None:
    """Measure the policy where it is due, while nothing else runs: this is still the boundary."""
    if await evaluator.evaluate_if_due():
        _remember_verifiers(online)


def _remember_verifiers(online: OnlineRun[Any]) -> None:
    """Note what rewards know that later judgements depend on."""
    if online.live is not None:
        states = {domain: reward.state() for domain, reward in online.live.generation.rewards.items()}
        online.run.state.verifiers = {domain: state for domain, state in states.items() if state}
