"""From a configuration to the roles that the loop works with, and their end in reverse order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from roll.cluster.base import Cluster, num_accelerators, open_cluster
from roll.config.pipelines.rlvr import RLVRConfig
from roll.data import Data
from roll.inference import resolve_engine_kind
from roll.pipelines.checkpoint_files import SavedRun
from roll.pipelines.evaluation import Evaluator, measure
from roll.pipelines.generation import open_generation, start_roles
from roll.pipelines.hand_over import EVERYTHING, SharingTrainers, hands_over
from roll.pipelines.learner import Learner
from roll.pipelines.learning.losses import check_own_functions
from roll.pipelines.learning.state import LearningState
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.preparation import Prepared, prepare, probe_sequences, sampling_plans
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.rlvr import loop
from roll.pipelines.rlvr.circle import Circle
from roll.pipelines.rlvr.recorder import RecordingProxy, open_recorder
from roll.pipelines.rlvr.replay.generation import open_answering
from roll.pipelines.rlvr.replay.training import open_training
from roll.pipelines.rlvr.sampling import build_controller
from roll.pipelines.rlvr.trainers import device_role, learner_of, trainer_specs
from roll.pipelines.run import Run, Session, beginning
from roll.protocols import EngineGroup, TrainerGroup
from roll.rollout import LLMProxy
from roll.training import TrainerSpec
from roll.types import PromptDraw
from roll.weights import WeightSync

__all__ = ["PIPELINE"]

logger = logging.getLogger(__name__)


@asynccontextmanager
async def _open(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start what a run, or the replay of one, needs, and end it afterwards; inside, what is to be done.

    Raises:
        UserError: it cannot be done; says why.
    """
    kinds = {"": _open_run, "train": open_training, "rollout": open_answering}
    async with kinds[config.replay.only if config.replay else ""](config, session) as work:
        yield work


@asynccontextmanager
async def _open_run(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start every role, restore what a checkpoint holds, and end every role afterwards, also after an error."""
    tracker, saved = session.tracker, session.saved
    tracker.note("reading the model's files and the prompts")
    check_own_functions(config.algorithm)
    prepared = await asyncio.to_thread(prepare, config)
    data = prepared.data
    specs = await asyncio.to_thread(trainer_specs, config, prepared.model_path)
    state = beginning(saved, data.train, LearningState)
    hand_over = hands_over(config, accelerated=num_accelerators() > 0)
    beside = config.trainers_beside("actor_infer") if hand_over else []
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        roles, trainers = await start_roles(
            config,
            cluster,
            prepared,
            stack,
            run=session.directory,
            tracker=tracker,
            trainers=[(spec.role, _start(cluster, spec, aside=device_role(spec) in beside)) for spec in specs],
            hand_over=hand_over,
        )
        learner = learner_of(config, trainers)
        run = Run.of(config, config.training.num_steps, session, state, data.train, learner.policy, learner.critics)
        sharing = [t for spec, t in zip(specs, trainers, strict=True) if device_role(spec) in beside]
        memory = SharingTrainers(policy=learner.policy, trainers=sharing) if hand_over else None
        weights = _weight_sync(cluster, config, prepared, learner.policy, roles.engines, memory)
        records = config.tracking.record_rollouts
        recorder = open_recorder(config, prepared, state, tracker, run.ledger) if records else None
        generation = await open_generation(
            config,
            roles,
            data.renderer,
            stack,
            tracker=tracker,
            proxy_type=RecordingProxy if recorder else LLMProxy,
            bring_up=weights.push_to,
        )
        for domain, reward in generation.rewards.items():
            reward.restore(state.verifiers.get(domain, {}))
        if recorder is not None:
            recorder.listen(generation.scheduler.life, generation.proxy)
        plan, eval_plan = sampling_plans(config, prepared.stop_token_ids)
        controller = build_controller(config, state, data, run.ledger, generation, plan)
        live = LivePolicy(generation=generation, controller=controller, weights=weights, plan=plan, sharing=memory)
        evaluator = Evaluator(run, live, _held_out(config, data), eval_plan, config.evaluation, config.alarms)
        circle = Circle(
            config=config,
            run=run,
            learner=learner,
            batches=controller,
            engine_counts=generation.proxy.counts,
            live=live,
            recorder=recorder,
        )
        await _restore(run, learner, live, saved)
        yield partial(loop.train, circle, live, evaluator)


async def _restore(run: Run[Any], learner: Learner, live: LivePolicy, saved: SavedRun[Any] | None) -> None:
    """Load what a checkpoint holds of the trainers, which must have their memory for that, as for writing one."""
    run.checkpointer.before_writing = partial(live.hand_to_trainers, run)
    if saved is not None:
        run.tracker.note(f"loading the checkpoint of step {run.state.step}")
        await live.hand_to_trainers(run)
        await learner.load(saved)


def _held_out(config: RLVRConfig, data: Data) -> list[PromptDraw]:
    """What every evaluation answers."""
    found = data.evaluation(config.evaluation.num_prompts)
    if not found:
        best = ", and keep_best has nothing to go by" if config.checkpoint.keep_best else ""
        logger.warning("no source holds prompts out, so the run is not evaluated%s: set held_out", best)
    return found


async def _start(cluster: Cluster, spec: TrainerSpec, *, aside: bool) -> TrainerGroup:
    trainer = await cluster.start_trainer(spec, device_role(spec))
    if aside:  # of engines that start after it
        await trainer.offload(EVERYTHING)
    return trainer


def _weight_sync(
    cluster: Cluster,
    config: RLVRConfig,
    prepared: Prepared,
    policy: TrainerGroup,
    engines: EngineGroup,
    memory: SharingTrainers | None,
) -> WeightSync:
    return WeightSync(
        policy,
        engines,
        config.weight_sync,
        probe=probe_sequences(prepared.data),
        transport=cluster.transport(resolve_engine_kind(config.inference.engine)),
        at_hand=memory.syncing if memory else nullcontext,
    )


def _facts(config: RLVRConfig) -> RunFacts:
    return RunFacts(
        method=config.algorithm.type,
        where=_where_it_runs(config),
        num_steps=config.training.num_steps,
        rollouts_per_step=config.rollouts_per_step,
    )


def _where_it_runs(config: RLVRConfig) -> str:
    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" + ("s" if number != 1 else "")

    kind = "" if config.inference.engine == "auto" else f"{config.inference.engine} "
    engines, ranks = count(config.num_engines, f"{kind}engine"), count(config.num_ranks, "trainer rank")
    if config.replay is not None:
        engines, ranks = (engines, "no trainer") if config.replay.only == "rollout" else ("no engine", ranks)
    return f"{config.cluster.type}: {engines}, {ranks}, {count(os.cpu_count() or 1, 'core')}"


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=measure, state=LearningState)
