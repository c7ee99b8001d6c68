"""Construction: from a configuration to the parts that the loop works with, and their end in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from roll.cluster.base import Cluster, open_cluster
from roll.config import RLVRConfig
from roll.data import Data, build_data, held_out_draws
from roll.inference import EngineSpec, resolve_engine_kind
from roll.models import context_length, load_tokenizer, resolve_model, stop_token_ids
from roll.pipelines.checkpoint import Checkpointer
from roll.pipelines.judge import JudgeRole, start_judge
from roll.pipelines.learning.losses import check_own_functions
from roll.pipelines.parts import Parts
from roll.pipelines.replay.recorder import RecordingProxy, open_recorder
from roll.pipelines.saved import SavedRun
from roll.pipelines.scheduling import build_controller, build_router, build_scheduler
from roll.pipelines.state import RunState
from roll.pipelines.stop import StopRequest
from roll.pipelines.trainers import critic_path, critic_specs, policy_spec, reference_of, reference_specs
from roll.protocols import EngineGroup, Scorer, TrainerGroup, WorkerPool
from roll.rewards.compose import WeightedReward
from roll.rewards.opening import open_rewards
from roll.rollout import DataLedger, LLMProxy, SamplingPlan
from roll.rollout.lifecycle import FINAL
from roll.tracking import RunDirectory, Tracker
from roll.tracking.rollout_trace import RolloutTrace
from roll.types import IntArray, SamplingParams
from roll.weights import WeightSync

__all__ = ["Material", "engine_specs", "open_parts", "prepare_material", "sampling_plans"]

NUM_PROBES = 4
OBSERVATION_TOKENS = 160
"""Room for what an environment says between two turns; a tokenizer of single bytes needs most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What can be prepared without any device: the model's files, its tokenizer, the prompts."""

    model_path: Path
    critic_path: Path
    """Backbone of the critics, where there are any."""
    stop_token_ids: tuple[int, ...]
    data: Data
    max_context: int
    """Longest prompt plus answer that engines must hold, in tokens."""


def prepare_material(config: RLVRConfig) -> Material:
    """Resolve the model and read the data.

    Raises:
        UserError: the model or a source cannot be used; a prompt is longer than the context.
    """
    check_own_functions(config.algorithm)
    model_path = resolve_model(config.model.path)
    tokenizer = load_tokenizer(model_path)
    turns = max(entry.turns for entry in config.data)
    answer = config.rollout.max_new_tokens * turns + OBSERVATION_TOKENS * (turns - 1)
    max_context = config.inference.max_context or context_length(model_path)
    data = build_data(config.data, tokenizer, config.seed, max_context - answer)
    if config.inference.max_context is None and data.longest_prompt is not None:
        max_context = min(max_context, data.longest_prompt + answer)
    return Material(
        model_path=model_path,
        critic_path=critic_path(config, model_path, tokenizer),
        stop_token_ids=stop_token_ids(model_path),
        data=data,
        max_context=max_context,
    )


def sampling_plans(config: RLVRConfig, stop_ids: tuple[int, ...]) -> tuple[SamplingPlan, SamplingPlan]:
    """How training and evaluation sample."""
    rollout, evaluation = config.rollout, config.evaluation
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_ids,
    )
    return (
        SamplingPlan(purpose="train", group_size=rollout.group_size, sampling=sampling),
        SamplingPlan(
            purpose="eval",
            group_size=evaluation.samples_per_prompt,
            sampling=replace(sampling, temperature=evaluation.temperature),
        ),
    )


def engine_specs(config: RLVRConfig, material: Material, run: RunDirectory | None) -> list[EngineSpec]:
    """One spec per engine of the device mapping."""
    mapping = config.cluster.device_mapping
    trainers = {device for role in ("actor_train", "critic", "reference") for device in mapping.devices(role)}
    return [
        EngineSpec(
            engine_id=f"engine-{index}",
            kind=resolve_engine_kind(config.inference.engine),
            model_path=str(material.model_path),
            dtype=config.model.dtype,
            max_context=material.max_context,
            max_num_seqs=config.inference.max_num_seqs,
            kv_cache_bytes=config.inference.kv_cache_bytes,
            tensor_parallel=config.inference.tensor_parallel,
            seed=config.seed,
            num_threads=config.training.num_threads,
            colocated=bool(set(mapping.actor_infer) & trainers),
            trust_remote_code=config.model.trust_remote_code,
            options=config.inference.options,
            log_path=run.log_path("engine", index) if run else None,
        )
        for index in range(config.num_engines)
    ]


def probe_sequences(data: Data) -> list[IntArray]:
    """Token sequences that trainer and engines score after a sync: a few prompts, the same for the whole run."""
    draws = data.evaluation(NUM_PROBES) or held_out_draws(data.train.peek(NUM_PROBES), data.renderer)
    return [draw.token_ids for draw in draws]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Roles:
    trainer: TrainerGroup
    critics: tuple[TrainerGroup, ...]
    reference: Scorer | None
    engines: EngineGroup
    pool: WorkerPool
    judge: JudgeRole | None


async def _start_roles(
    cluster: Cluster, config: RLVRConfig, material: Material, run: RunDirectory, tracker: Tracker, stack: AsyncExitStack
) -> _Roles:
    """Start trainers, engines, reward workers and the judge at the same time; whatever started is closed by `stack`."""
    critics = critic_specs(config, material.critic_path)
    frozen = reference_specs(config, material.model_path)
    judge = [start_judge(config, cluster, run, tracker.spans.event)] if config.judge else []
    started = await asyncio.gather(
        cluster.start_engines(engine_specs(config, material, run)),
        cluster.start_pool(config.rollout.num_reward_workers),
        *judge,
        *map(cluster.start_trainer, [policy_spec(config, material.model_path), *critics, *frozen]),
        return_exceptions=True,
    )
    for role in started:
        if not isinstance(role, BaseException):
            stack.push_async_callback(role.close)
    for role in started:
        if isinstance(role, BaseException):
            raise role
    engines, pool, *others = cast(list[Any], started)  # exceptions were raised above
    own_judge = others.pop(0) if judge else None
    trainer, *others = others
    return _Roles(
        trainer=trainer,
        critics=tuple(others[: len(critics)]),
        reference=reference_of(config, trainer, others[len(critics) :]),
        engines=engines,
        pool=pool,
        judge=own_judge,
    )


async def _load_trainers(roles: _Roles, saved: SavedRun | None) -> None:
    if saved is not None:
        await roles.trainer.load(saved.trainer_path)
        for index, critic in enumerate(roles.critics):
            await critic.load(saved.critic_path(index))


async def _open_rewards(
    config: RLVRConfig, roles: _Roles, state: RunState, stack: AsyncExitStack
) -> dict[str, WeightedReward]:
    judge = roles.judge.model if roles.judge else None
    rewards = await stack.enter_async_context(open_rewards(config, roles.pool, judge))
    for domain, reward in rewards.items():
        reward.restore(state.verifiers.get(domain, {}))
    return rewards


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
    material = await asyncio.to_thread(prepare_material, config)
    state = saved.state if saved else RunState(data=material.data.train.state())
    material.data.train.restore(state.data)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config, run)
        stack.push_async_callback(cluster.close)
        roles = await _start_roles(cluster, config, material, run, tracker, stack)
        await _load_trainers(roles, saved)
        weights = WeightSync(
            roles.trainer,
            roles.engines,
            config.weight_sync,
            probe=probe_sequences(material.data),
            transport=cluster.transport(resolve_engine_kind(config.inference.engine)),
        )
        recorder = open_recorder(config, run, material, state) if config.tracking.record_rollouts else None
        proxy = (RecordingProxy if recorder else LLMProxy)(
            roles.engines, weights.push_to, max_attempts=config.rollout.max_attempts, router=build_router(config)
        )
        ledger = saved.ledger if saved else DataLedger()
        train_plan, eval_plan = sampling_plans(config, material.stop_token_ids)
        rewards = await _open_rewards(config, roles, state, stack)
        scheduler = build_scheduler(config, proxy, rewards, material.data.renderer, tracker.on_rollout)
        if recorder is not None:
            recorder.listen(scheduler.life, proxy)
        if config.tracking.trace_rollouts:
            scheduler.life.listen(RolloutTrace(tracker.spans.event, FINAL).on_transition)
        yield Parts(
            config=config,
            state=state,
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
            trainer=roles.trainer,
            reference=roles.reference,
            critics=roles.critics,
            weights=weights,
            checkpointer=Checkpointer(run, config.checkpoint, roles.trainer, roles.critics),
            tracker=tracker,
            spans=tracker.spans,
            stop=stop,
            recorder=recorder,
        )
