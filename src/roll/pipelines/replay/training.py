"""Training on recorded batches: the loop of `rlvr`, with the recording in place of generation.

    recording ─► batch ─► filter ─► advantages ─► train ─► boundary ─► next batch …

No engine is started, nothing is scored, and nothing is evaluated: there is nobody to answer. With the recorded
configuration every metric of training, and the weights, are those of the recorded run, bit for bit. With another
algorithm it is an off-line study: the recorded log-probs and policy versions are those of the policy that answered,
and ratios and corrections are taken against them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from roll.cluster.base import open_cluster, start_together
from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines import saving, steps
from roll.pipelines.checkpoint import Checkpointer
from roll.pipelines.learning.collecting import Collected, chosen
from roll.pipelines.material import prepare_material, sampling_plans
from roll.pipelines.parts import Parts
from roll.pipelines.replay.batches import RecordedBatches
from roll.pipelines.replay.checks import check_material, check_steps, check_training, open_recording, start_of
from roll.pipelines.saved import SavedRun
from roll.pipelines.state import RunState
from roll.pipelines.stop import Interrupted, StopRequest
from roll.pipelines.trainers import Trainers, device_role, trainer_specs
from roll.protocols import InferenceEngine
from roll.rollout import DataLedger, LLMProxy, RolloutScheduler
from roll.tracking import RunDirectory, Tracker
from roll.tracking.stages import Stages
from roll.weights import SyncReport

__all__ = ["open_training", "train_again"]


async def train_again(parts: Parts) -> None:
    """Run the remaining recorded steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        DataError: the recording is damaged, or the data are not those of the recorded run.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    state = parts.state
    try:
        while state.step < parts.config.training.num_steps:
            with parts.spans.step(state.step + 1):
                collected = await parts.stop.unless(_collect(parts))
                metrics = await steps.update(parts, collected)
                alarms = await steps.cross_boundary(parts, collected, metrics)
                await saving.save_if_due(parts, alarms)
    except Interrupted:
        await saving.save_boundary(parts)
        raise
    if parts.config.checkpoint.at_end:
        await saving.save(parts)


async def _collect(parts: Parts) -> Collected:
    with parts.spans.phase("read"):
        batch = await parts.controller.next_batch()
    assert isinstance(parts.controller, RecordedBatches), "a replay hands out recorded batches"
    weighed = parts.config.algorithm.imitation.weight > 0
    return chosen(parts, batch, parts.controller.demonstrations if weighed else ())


@asynccontextmanager
async def open_training(
    config: RLVRConfig, run: RunDirectory, tracker: Tracker, stop: StopRequest, *, saved: SavedRun | None = None
) -> AsyncIterator[Parts]:
    """Compare with the recording, start the trainers alone, and end them afterwards.

    Args:
        config: with `replay`.
        run: directory of the replay.
        tracker: of the replay.
        stop: set by a signal.
        saved: checkpoint of the replay itself, where it is resumed.

    Raises:
        UserError: this cannot be replayed; says why.
    """
    recording = await asyncio.to_thread(open_recording, config)
    saved = saved or start_of(config)
    check_steps(recording, (saved.state.step if saved else 0) + 1, config.training.num_steps)
    material = await asyncio.to_thread(prepare_material, config)
    check_material(recording.start, material)
    check_training(config, recording, recording.start)
    state = saved.state if saved else RunState(data=material.data.train.state())
    material.data.train.restore(state.data)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, run)
        stack.push_async_callback(cluster.close)
        specs = trainer_specs(config, material.model_path, material.critic_path)
        starting = (cluster.start_trainer(spec, device_role(spec)) for spec in specs)
        trainers = Trainers.of(config, await start_together(stack, *starting))
        if saved:
            await trainers.load(saved)
        proxy = LLMProxy(_NoEngines())
        ledger = saved.ledger if saved else DataLedger()
        train_plan, eval_plan = sampling_plans(config, material.stop_token_ids)
        yield Parts(
            config=config,
            state=state,
            began_at=state.step,
            data=material.data,
            held_out=[],
            ledger=ledger,
            proxy=proxy,
            scheduler=RolloutScheduler(proxy, {}, material.data.renderer, seed=config.seed),
            controller=RecordedBatches(recording, material.data, state, ledger, proxy),
            rewards={},
            train_plan=train_plan,
            eval_plan=eval_plan,
            trainer=trainers.policy,
            reference=trainers.reference,
            critics=trainers.critics,
            weights=_NoSync(),
            judge=None,
            checkpointer=Checkpointer(
                run, config.checkpoint, trainers.policy, trainers.critics, on_saved=tracker.callbacks.saved
            ),
            tracker=tracker,
            spans=tracker.spans,
            stages=Stages(tracker.spans),
            stop=stop,
        )


class _NoEngines:
    """An `EngineGroup` without engines."""

    engines: Sequence[InferenceEngine] = ()

    async def replace(self, engine_id: str) -> InferenceEngine:
        """There is none to replace."""
        raise AssertionError(f"a replay has no engine {engine_id}")

    async def close(self) -> None:
        """Nothing was started."""


class _NoReport(SyncReport):
    """Of a sync that had nowhere to go."""

    def metrics(self) -> dict[str, float]:
        """None: no byte was moved."""
        return {}


class _NoSync:
    """In place of `WeightSync` where no engine wants the weights."""

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """See `WeightSync.changing`."""
        yield

    async def push(
        self, policy_version: int, *, still: AbstractAsyncContextManager[object] | None = None
    ) -> SyncReport:
        """See `WeightSync.push`."""
        return _NoReport(
            policy_version=policy_version, transport="none", seconds=0.0, num_bytes=0, num_tensors=0, engines=()
        )
