"""Construction: from a configuration to the parts that the loop works with, and their end in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from roll.cluster.base import Cluster, open_cluster, start_together
from roll.config.pipelines.rlvr import RLVRConfig
from roll.inference import resolve_engine_kind
from roll.pipelines.checkpoint import Checkpointer
from roll.pipelines.judge import JudgeRole, start_judge
from roll.pipelines.material import Material, engine_specs, prepare_material, probe_sequences, sampling_plans
from roll.pipelines.parts import Parts
from roll.pipelines.replay.recorder import RecordingProxy, open_recorder
from roll.pipelines.saved import SavedRun
from roll.pipelines.scheduling import build_controller, build_router, build_scheduler
from roll.pipelines.start_notes import StartNotes
from roll.pipelines.state import RunState
from roll.pipelines.stop import StopRequest
from roll.pipelines.trainers import Trainers, device_role, trainer_specs
from roll.pipelines.watching import watch
from roll.protocols import EngineGroup, WorkerPool
from roll.rewards.compose import WeightedReward
from roll.rewards.opening import open_rewards
from roll.rollout import DataLedger, LLMProxy
from roll.tracking import RunDirectory, Tracker
from roll.weights import WeightSync

__all__ = ["open_parts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Roles:
    trainers: Trainers
    engines: EngineGroup
    pool: WorkerPool
    judge: JudgeRole | None


async def _start_roles(
    cluster: Cluster, config: RLVRConfig, material: Material, run: RunDirectory, tracker: Tracker, stack: AsyncExitStack
) -> _Roles:
    """Start trainers, engines, reward workers and the judge at the same time; whatever started is closed by `stack`."""
    specs = trainer_specs(config, material.model_path, material.critic_path)
    kind = resolve_engine_kind(config.inference.engine)
    progress = StartNotes(tracker.note)
    engines, pool, judge, *trainers = await start_together(
        stack,
        progress.of(f"engines ({kind})", cluster.start_engines(engine_specs(config, material, run), "actor_infer")),
        cluster.start_pool(config.rollout.reward_workers),
        progress.of("judge", start_judge(config, cluster, run, tracker.spans.event)) if config.judge else _nobody(),
        *(progress.of(f"trainer ({spec.role})", cluster.start_trainer(spec, device_role(spec))) for spec in specs),
    )
    return _Roles(trainers=Trainers.of(config, trainers), engines=engines, pool=pool, judge=judge)


async def _nobody() -> None:
    """In place of a role that the run does not have."""


def _weight_sync(cluster: Cluster, config: RLVRConfig, material: Material, roles: _Roles) -> WeightSync:
    return WeightSync(
        roles.trainers.policy,
        roles.engines,
        config.weight_sync,
        probe=probe_sequences(material.data),
        transport=cluster.transport(resolve_engine_kind(config.inference.engine)),
    )


async def _open_rewards(
    config: RLVRConfig, roles: _Roles, state: RunState, stack: AsyncExitStack
) -> dict[str, WeightedReward]:
    judge = roles.judge.model if roles.judge else None
    rewards = await stack.enter_async_context(open_rewards(config.data, config.sandbox, roles.pool, judge))
    for domain, reward in rewards.items():
        reward.restore(state.verifiers.get(domain, {}))
    return rewards


def _checkpointer(run: RunDirectory, config: RLVRConfig, trainers: Trainers, tracker: Tracker) -> Checkpointer:
    saved = tracker.callbacks.saved
    return Checkpointer(run, config.checkpoint, trainers.policy, trainers.critics, on_saved=saved)


@asynccontextmanager
async def open_parts(
    config: RLVRConfig,
    run: RunDirectory,
    tracker: Tracker,
    stop: StopRequest,
    *,
    saved: SavedRun | None = None,
) -> AsyncIterator[Parts]:
    """Start every role, restore what a checkpoint holds, and end every role afterwards, also after an error."""
    tracker.note("reading the model's files and the prompts")
    material = await asyncio.to_thread(prepare_material, config)
    state = saved.state if saved else RunState(data=material.data.train.state())
    material.data.train.restore(state.data)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, run)
        stack.push_async_callback(cluster.close)
        roles = await _start_roles(cluster, config, material, run, tracker, stack)
        trainers = roles.trainers
        if saved is not None:
            tracker.note(f"loading the checkpoint of step {state.step}")
            await trainers.load(saved)
        weights = _weight_sync(cluster, config, material, roles)
        ledger = saved.ledger if saved else DataLedger()
        records = config.tracking.record_rollouts
        recorder = open_recorder(config, material, state, tracker, ledger) if records else None
        proxy_type, attempts = RecordingProxy if recorder else LLMProxy, config.rollout.max_attempts
        proxy = proxy_type(roles.engines, weights.push_to, max_attempts=attempts, router=build_router(config))
        stack.push_async_callback(proxy.close)
        train_plan, eval_plan = sampling_plans(config, material.stop_token_ids)
        rewards = await _open_rewards(config, roles, state, stack)
        scheduler = build_scheduler(config, proxy, rewards, material.data.renderer, tracker.on_rollout)
        if recorder is not None:
            recorder.listen(scheduler.life, proxy)
        retries, stages = watch(config, scheduler, tracker, stack)
        yield Parts(
            config=config,
            state=state,
            began_at=state.step,
            retries=retries,
            data=material.data,
            held_out=material.data.evaluation(config.evaluation.num_prompts),
            ledger=ledger,
            proxy=proxy,
            scheduler=scheduler,
            controller=build_controller(config, state, material.data, ledger, scheduler, proxy, train_plan),
            rewards=rewards,
            judge=roles.judge,
            train_plan=train_plan,
            eval_plan=eval_plan,
            trainer=trainers.policy,
            reference=trainers.reference,
            critics=trainers.critics,
            weights=weights,
            checkpointer=_checkpointer(run, config, trainers, tracker),
            tracker=tracker,
            spans=tracker.spans,
            stages=stages,
            stop=stop,
            recorder=recorder,
        )
