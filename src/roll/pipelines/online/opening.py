"""Opens an online run from its configuration; roles are shut down in reverse order."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from roll.cluster.base import Cluster, count_accelerators, open_cluster
from roll.config.online import OnlineConfig
from roll.config.rollout_run import RolloutRunConfig
from roll.config.training import check_back_end
from roll.data import PromptData
from roll.inference import EngineSpec, resolve_engine_kind
from roll.pipelines.checkpoint_files import SavedRun
from roll.pipelines.colocation import (
    ALL_STATE_KINDS,
    SharedDevices,
    explain_sharing_rule,
    list_released_engines,
    resolve_sharing_rule,
)
from roll.pipelines.engine_checks import check_engines
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.fingerprints import compute_fingerprints
from roll.pipelines.generation import StartedRoles, open_generation, start_roles
from roll.pipelines.instant_checks import check_disk, check_run_references, check_run_rewards
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.online_run import OnlineRun, Recorder
from roll.pipelines.online.sampling import build_controller
from roll.pipelines.preparation import PreparedRun, build_sampling_plans, select_probe_draws
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Run, Session, restore_state
from roll.pipelines.served_policy import ServedPolicy
from roll.pipelines.state import RunState
from roll.pipelines.weight_store import check_weight_store, open_weight_store
from roll.protocols import TrainerGroup
from roll.rollout import AsyncController, LLMProxy
from roll.rollout.engine_group import EngineGroup
from roll.training import Schedule, TrainerSpec
from roll.types import PromptDraw
from roll.weights import WeightSync

__all__ = ["RoleSpec", "build_facts", "build_policy_spec", "build_weight_sync", "open_online"]

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RolloutRunConfig)


class RoleSpec(NamedTuple):
    """A role to start: its name, and the spec of its trainer or the specs of its engines."""

    role: str
    """Name of the role in the device mapping."""
    spec: TrainerSpec | Sequence[EngineSpec]


@asynccontextmanager
async def open_online(
    config: C,
    session: Session,
    prepared: PreparedRun,
    role_specs: Sequence[RoleSpec],
    build_learner: Callable[[Sequence[Any]], Learner],
    *,
    make_controller: Callable[..., AsyncController] = build_controller,
    build_recorder: Callable[[Run[LearningState]], Recorder] | None = None,
    proxy_type: type[LLMProxy] = LLMProxy,
    state_type: type[LearningState] = LearningState,
) -> AsyncIterator[OnlineRun[C, ServedPolicy]]:
    """Start all roles, restore the checkpoint, yield the run, and shut the roles down, even after an error.

    Args:
        config: Configuration of the run.
        session: Session of this process.
        prepared: The model's files and the prompts.
        role_specs: Roles to start, except the policy's engines and the judge; the policy's trainer comes first.
        build_learner: Builds the learner from the started roles of `role_specs`, in the same order.
        make_controller: Builds the controller; called with the arguments of `build_controller`.
        build_recorder: Builds the recorder of the run.
        proxy_type: Class of the proxy.
        state_type: Class of the run's state.

    Raises:
        UserError: The run cannot start; the message gives the reason.
    """
    tracker, data, path = session.tracker, prepared.data, session.directory.path
    state = await _check_and_restore_state(config, session, prepared, role_specs, state_type)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        roles, started, devices = await _start(config, session, cluster, prepared, role_specs, stack)
        learner = build_learner(started)
        run = Run.create(config, config.training.num_steps, session, state, data.train, learner.policy, learner.critics)
        weights = build_weight_sync(cluster, config, data, learner.policy, roles.engines, devices, path)
        recorder = build_recorder(run) if build_recorder else None
        generation = await open_generation(
            config, roles, data.renderer, stack, tracker=tracker, proxy_type=proxy_type, prepare_engine=weights.push_to
        )
        generation.restore(state.verifiers)
        if recorder is not None:
            recorder.listen(generation.scheduler.lifecycle, generation.proxy)
        plan, eval_plan = build_sampling_plans(config, prepared.stop_token_ids)
        controller = make_controller(config, state, data, run.ledger, generation, plan)
        policy_engines = ServedPolicy(
            run=run, generation=generation, controller=controller, weights=weights, plan=plan, devices=devices
        )
        held_out = _list_held_out_draws(config, data)
        await _restore(run, learner, policy_engines, session.saved)
        yield OnlineRun(
            config=config,
            run=run,
            learner=learner,
            batches=controller,
            policy_engines=policy_engines,
            evaluator=Evaluator(run, policy_engines, held_out, eval_plan, config.evaluation, config.alarms),
            recorder=recorder,
        )


async def _check_and_restore_state(
    config: RolloutRunConfig,
    session: Session,
    prepared: PreparedRun,
    role_specs: Sequence[RoleSpec],
    state_type: type[LearningState],
) -> LearningState:
    """Run all checks that need no role, and return the initial state of the session."""
    check_engines(config)
    check_weight_store(config)
    check_back_end(config.training.backend)
    data, trainers = prepared.data, [each.spec for each in role_specs if isinstance(each.spec, TrainerSpec)]
    state = restore_state(
        session.saved, data.train, state_type, compute_fingerprints(config, data.held_out_fingerprints)
    )
    check_disk(config, config.training, prepared.model_path, session, trainers)
    await session.stop.run_unless_stopped(check_run_references(config.data, data))
    await session.stop.run_unless_stopped(check_run_rewards(config.data, config.sandbox, data))
    return state


async def _start(
    config: RolloutRunConfig,
    session: Session,
    cluster: Cluster,
    prepared: PreparedRun,
    role_specs: Sequence[RoleSpec],
    stack: AsyncExitStack,
) -> tuple[StartedRoles, list[Any], SharedDevices | None]:
    """Start all roles.

    Returns:
        Engines, reward workers and judge; the started roles of `role_specs`, in order; and the devices that trainers
        and engines share, or `None` if they share none.
    """
    session.tracker.save_tokenizer(prepared.tokenizer)
    accelerated = count_accelerators() > 0
    rule = resolve_sharing_rule(config, accelerated=accelerated)
    if explanation := explain_sharing_rule(config, accelerated=accelerated):
        session.tracker.note(explanation)
    released = list_released_engines(config, rule)
    colocated = config.find_colocated_trainers("actor_infer") if released else []

    async def start(role: str, spec: TrainerSpec | Sequence[EngineSpec]) -> Any:
        if not isinstance(spec, TrainerSpec):
            return await cluster.start_engines(spec, role)
        trainer = await cluster.start_trainer(spec, role)
        if role in colocated:  # frees the memory for engines that start after it
            await trainer.offload(ALL_STATE_KINDS)
        return trainer

    roles, started = await start_roles(
        config,
        cluster,
        prepared,
        stack,
        run=session.directory,
        tracker=session.tracker,
        trainers=[("policy" if role == "actor_train" else role, start(role, spec)) for role, spec in role_specs],
        released_engines=released,
    )
    sharing = [trainer for (role, _), trainer in zip(role_specs, started, strict=True) if role in colocated]
    engine_ids = [roles.engines.engines[index].engine_id for index in released]
    return roles, started, SharedDevices(started[0], sharing, engine_ids, rule) if released else None


async def _restore(run: Run[Any], learner: Learner, policy_engines: ServedPolicy, saved: SavedRun[Any] | None) -> None:
    """Load the checkpoint `saved` into the trainers, if there is one.

    The trainers are onloaded before a checkpoint is loaded, and before each checkpoint is saved.
    """
    run.checkpointer.before_writing = policy_engines.release_devices
    if saved is not None:
        run.tracker.note(f"loading the checkpoint of step {run.state.step}")
        await policy_engines.release_devices()
        await learner.load(saved)


def build_weight_sync(
    cluster: Cluster,
    config: RolloutRunConfig,
    data: PromptData,
    policy: TrainerGroup,
    engines: EngineGroup,
    devices: SharedDevices | None,
    run_dir: Path,
) -> WeightSync:
    """Build the weight sync from the policy to its engines.

    Args:
        cluster: Cluster on which trainer and engines run.
        config: Configuration of the run.
        data: Data whose prompts are used as probes.
        policy: The policy's trainer.
        engines: The policy's engines.
        devices: Devices that trainer and engines share; `None` if they do not take turns.
        run_dir: Directory of the run.
    """
    probes = select_probe_draws(data)
    return WeightSync(
        policy,
        engines,
        config.weight_sync,
        probe=[draw.token_ids for draw in probes],
        probe_media=[draw.media for draw in probes],
        transport=cluster.choose_transport(resolve_engine_kind(config.inference.engine)),
        store=open_weight_store(config, run_dir),
        computes_in_8_bits=config.inference.quantization != "none",
        weights_on_device=devices.onload_for_sync if devices else nullcontext,
    )


def _list_held_out_draws(config: RolloutRunConfig, data: PromptData) -> list[PromptDraw]:
    """Return the held-out prompts as draws; every evaluation uses the same draws."""
    draws = data.get_evaluation_draws(config.evaluation.num_prompts)
    if not draws:
        best = ", and keep_best cannot compare checkpoints" if config.checkpoint.keep_best else ""
        is_set = any(getattr(entry, "held_out", 0) for entry in config.data)
        # Rows are held out by the content of their prompts, so few different prompts may all be trained on.
        remedy = "raise held_out, or add prompts that differ from the others" if is_set else "set held_out"
        logger.warning("no source has held-out prompts, so the run is not evaluated%s: %s", best, remedy)
    return draws


def build_facts(
    config: RolloutRunConfig, _: RunState, method: str, *, engines: str | None = None, ranks: str | None = None
) -> RunFacts:
    """Return the facts that are shown about a run before its first step.

    Args:
        config: Configuration of the run.
        _: State of the run; unused, since the number of steps is configured.
        method: Name of the method.
        engines: Text that replaces the number of engines.
        ranks: Text that replaces the number of trainer ranks.
    """
    kind = "" if config.inference.engine == "auto" else f"{config.inference.engine} "
    engines = engines or _format_count(config.num_engines, f"{kind}engine")
    if len(widths := config.inference.widths) > 1:
        engines += f" (width {widths[0]} of {', '.join(map(str, widths))})"
    ranks = ranks or _format_count(config.num_ranks, "trainer rank")
    return RunFacts(
        method=method,
        setup=f"{config.cluster.type}: {engines}, {ranks}, {_format_count(os.cpu_count() or 1, 'core')}",
        num_steps=config.training.num_steps,
        rollouts_per_step=config.rollouts_per_step,
    )


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def build_policy_spec(config: OnlineConfig, model_path: Path, **more: Any) -> TrainerSpec:
    """Return the trainer spec of the policy, for a single rank.

    Args:
        config: Configuration of the run.
        model_path: Path of the model's files.
        more: Additional fields of the spec.
    """
    return TrainerSpec(
        model_path=str(model_path),
        model=config.model,
        training=config.training,
        quantization=config.sent_quantization,
        sends_adapter=config.synced_adapter is not None,
        schedule=Schedule.from_config(config.training, updates_per_step=config.updates_per_step),
        seed=config.seed,
        **more,
    )
