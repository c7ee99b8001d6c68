"""Opening of an online run from its configuration, and shutdown in reverse order."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from roll.cluster.base import Cluster, num_accelerators, open_cluster
from roll.config.generating import GeneratingConfig
from roll.config.online import OnlineConfig
from roll.config.training import check_back_end
from roll.data import Data
from roll.inference import EngineSpec, resolve_engine_kind
from roll.pipelines.checkpoint_files import SavedRun
from roll.pipelines.colocation import EVERYTHING, SharedDevices, offloads_colocated
from roll.pipelines.engine_checks import check_engines
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.fingerprints import fingerprints
from roll.pipelines.generation import Roles, open_generation, start_roles
from roll.pipelines.instant_checks import check_disk, check_own_references, check_own_rewards
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.online_run import OnlineRun, Recorder
from roll.pipelines.online.sampling import build_controller
from roll.pipelines.preparation import Prepared, probe_sequences, sampling_plans
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Run, Session, restore_state
from roll.pipelines.served_policy import ServedPolicy
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup
from roll.rollout import AsyncController, LLMProxy
from roll.rollout.engine_group import EngineGroup
from roll.training import Schedule, TrainerSpec
from roll.types import PromptDraw
from roll.weights import WeightSync

__all__ = ["RoleSpec", "facts", "open_online", "policy_spec", "weight_sync"]

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=GeneratingConfig)


class RoleSpec(NamedTuple):
    """A trainer, or engines other than the policy's, with its role."""

    role: str
    """Name of the role in the device mapping."""
    spec: TrainerSpec | Sequence[EngineSpec]


@asynccontextmanager
async def open_online(
    config: C,
    session: Session,
    prepared: Prepared,
    placed: Sequence[RoleSpec],
    learner_of: Callable[[Sequence[Any]], Learner],
    *,
    controlled: Callable[..., AsyncController] = build_controller,
    recorder_of: Callable[[Run[LearningState]], Recorder] | None = None,
    proxy_type: type[LLMProxy] = LLMProxy,
    state_type: type[LearningState] = LearningState,
) -> AsyncIterator[OnlineRun[C, ServedPolicy]]:
    """Start every role, restore the checkpoint, and shut every role down afterwards, also after an error.

    Args:
        config: Configuration of the run.
        session: Session of this process.
        prepared: The model's files and the prompts.
        placed: The policy's trainer, and other trainers and engines apart from the policy's engines and the judge.
        learner_of: Builds the learner from the started `placed`, in order.
        controlled: Builds the controller; called with the arguments of `build_controller`.
        recorder_of: Builds the recorder of the run.
        proxy_type: Class of the proxy.
        state_type: Class of the run's state.

    Raises:
        UserError: The run cannot start; the message has the reason.
    """
    tracker, data = session.tracker, prepared.data
    state = await _begin(config, session, prepared, placed, state_type)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        roles, started, devices = await _start(config, session, cluster, prepared, placed, stack)
        learner = learner_of(started)
        run = Run.of(config, config.training.num_steps, session, state, data.train, learner.policy, learner.critics)
        weights = weight_sync(cluster, config, data, learner.policy, roles.engines, devices)
        recorder = recorder_of(run) if recorder_of else None
        generation = await open_generation(
            config, roles, data.renderer, stack, tracker=tracker, proxy_type=proxy_type, bring_up=weights.push_to
        )
        generation.restore(state.verifiers)
        if recorder is not None:
            recorder.listen(generation.scheduler.life, generation.proxy)
        plan, eval_plan = sampling_plans(config, prepared.stop_token_ids)
        controller = controlled(config, state, data, run.ledger, generation, plan)
        live = ServedPolicy(
            run=run, generation=generation, controller=controller, weights=weights, plan=plan, devices=devices
        )
        evaluator = Evaluator(run, live, _held_out(config, data), eval_plan, config.evaluation, config.alarms)
        await _restore(run, learner, live, session.saved)
        yield OnlineRun(
            config=config,
            run=run,
            learner=learner,
            batches=controller,
            live=live,
            evaluator=evaluator,
            recorder=recorder,
        )


async def _begin(
    config: GeneratingConfig,
    session: Session,
    prepared: Prepared,
    placed: Sequence[RoleSpec],
    state_type: type[LearningState],
) -> LearningState:
    """Return the state in which the session begins, after all checks that are possible before a role starts."""
    check_engines(config)
    check_back_end(config.training.backend)
    data, trainers = prepared.data, [each.spec for each in placed if isinstance(each.spec, TrainerSpec)]
    state = restore_state(session.saved, data.train, state_type, fingerprints(config, data.held_out_fingerprints))
    check_disk(config, config.training, prepared.model_path, session, trainers)
    await session.stop.run_unless_stopped(check_own_references(config.data, data))
    await session.stop.run_unless_stopped(check_own_rewards(config.data, config.sandbox, data))
    return state


async def _start(
    config: GeneratingConfig,
    session: Session,
    cluster: Cluster,
    prepared: Prepared,
    placed: Sequence[RoleSpec],
    stack: AsyncExitStack,
) -> tuple[Roles, list[Any], SharedDevices | None]:
    """Start all roles; return them, the placed trainers and engines in order, and the devices that they share with
    engines.
    """
    session.tracker.keep_tokenizer(prepared.tokenizer)
    hand_over = offloads_colocated(config, accelerated=num_accelerators() > 0)
    colocated = config.colocated_trainers("actor_infer") if hand_over else []

    async def start(role: str, spec: TrainerSpec | Sequence[EngineSpec]) -> Any:
        if not isinstance(spec, TrainerSpec):
            return await cluster.start_engines(spec, role)
        trainer = await cluster.start_trainer(spec, role)
        if role in colocated:  # frees the memory for engines that start after it
            await trainer.offload(EVERYTHING)
        return trainer

    roles, started = await start_roles(
        config,
        cluster,
        prepared,
        stack,
        run=session.directory,
        tracker=session.tracker,
        trainers=[("policy" if role == "actor_train" else role, start(role, spec)) for role, spec in placed],
        hand_over=hand_over,
    )
    sharing = [trainer for (role, _), trainer in zip(placed, started, strict=True) if role in colocated]
    return roles, started, SharedDevices(started[0], sharing) if hand_over else None


async def _restore(run: Run[Any], learner: Learner, live: ServedPolicy, saved: SavedRun[Any] | None) -> None:
    """Load a checkpoint into the trainers, which must hold the shared devices for that, as for writing one."""
    run.checkpointer.before_writing = live.hand_to_trainers
    if saved is not None:
        run.tracker.note(f"loading the checkpoint of step {run.state.step}")
        await live.hand_to_trainers()
        await learner.load(saved)


def weight_sync(
    cluster: Cluster,
    config: GeneratingConfig,
    data: Data,
    policy: TrainerGroup,
    engines: EngineGroup,
    devices: SharedDevices | None,
) -> WeightSync:
    """Build the weight sync from the policy to its engines.

    Args:
        cluster: Cluster of both.
        config: Configuration of the run.
        data: Data whose prompts are used as probes.
        policy: The policy's trainer.
        engines: The policy's engines.
        devices: Devices that trainer and engines share, if they hand memory over.
    """
    return WeightSync(
        policy,
        engines,
        config.weight_sync,
        probe=probe_sequences(data),
        transport=cluster.transport(resolve_engine_kind(config.inference.engine)),
        weights_on_device=devices.syncing if devices else nullcontext,
    )


def _held_out(config: GeneratingConfig, data: Data) -> list[PromptDraw]:
    """Return the prompt draws of every evaluation."""
    found = data.evaluation(config.evaluation.num_prompts)
    if not found:
        best = ", and keep_best has nothing to go by" if config.checkpoint.keep_best else ""
        logger.warning("no source holds prompts out, so the run is not evaluated%s: set held_out", best)
    return found


def facts(
    config: GeneratingConfig, _: RunState, method: str, *, engines: str | None = None, ranks: str | None = None
) -> RunFacts:
    """Return the facts that are shown about a run before its first step.

    Args:
        config: Configuration of the run.
        _: State of the run, on which the number of steps does not depend.
        method: Name of the method.
        engines: Text that replaces the number of engines.
        ranks: Text that replaces the number of trainer ranks.
    """
    kind = "" if config.inference.engine == "auto" else f"{config.inference.engine} "
    engines = engines or _count(config.num_engines, f"{kind}engine")
    ranks = ranks or _count(config.num_ranks, "trainer rank")
    return RunFacts(
        method=method,
        where=f"{config.cluster.type}: {engines}, {ranks}, {_count(os.cpu_count() or 1, 'core')}",
        num_steps=config.training.num_steps,
        rollouts_per_step=config.rollouts_per_step,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def policy_spec(config: OnlineConfig, model_path: Path, **more: Any) -> TrainerSpec:
    """Return the trainer spec of the policy, for a single rank.

    Args:
        config: Configuration of the run.
        model_path: Path of the model's files.
        more: Other fields of the spec.
    """
    return TrainerSpec(
        model_path=str(model_path),
        model=config.model,
        training=config.training,
        quantization=config.inference.quantization,
        schedule=Schedule.of(config.training, updates_per_step=config.updates_per_step),
        seed=config.seed,
        **more,
    )
