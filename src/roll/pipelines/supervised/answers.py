"""Engines of a supervised run that answer prompts in its evaluations."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from roll.cluster.base import Cluster, count_accelerators
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import DataError
from roll.pipelines.colocation import ALL_STATE_KINDS, SharedDevices, list_released_engines, resolve_sharing_rule
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.generation import open_generation, start_roles
from roll.pipelines.online.opening import build_weight_sync
from roll.pipelines.preparation import build_sampling_plans, prepare
from roll.pipelines.run import Run, Session
from roll.pipelines.served_policy import ServedPolicy
from roll.protocols import TrainerGroup
from roll.running import run_in_thread

__all__ = ["open_answers"]


async def open_answers(
    config: RolloutRunConfig,
    session: Session,
    cluster: Cluster,
    run: Run[Any],
    policy: TrainerGroup,
    stack: AsyncExitStack,
) -> Evaluator:
    """Start engines that receive the policy's weights before they generate answers.

    Args:
        config: Configuration of engines, prompts and rewards.
        session: Session of this process.
        cluster: Cluster on which the engines start.
        run: Run of the policy.
        policy: The started trainer of the policy.
        stack: Exit stack that closes everything that is opened.

    Raises:
        UserError: The engines cannot start; the message gives the reason.
    """
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    draws = prepared.data.get_evaluation_draws(config.evaluation.num_prompts)
    if not draws:
        raise DataError("no source of evaluation.answers.data has held-out prompts: set held_out for one.")
    rule = resolve_sharing_rule(config, accelerated=count_accelerators() > 0)
    released = list_released_engines(config, rule)
    if released:
        await policy.offload(ALL_STATE_KINDS)
    tracker = session.tracker
    roles, _ = await start_roles(
        config, cluster, prepared, stack, run=session.directory, tracker=tracker, released_engines=released
    )
    engine_ids = [roles.engines.engines[index].engine_id for index in released]
    devices = SharedDevices(policy, [policy], engine_ids, rule) if released else None
    weights = build_weight_sync(cluster, config, prepared.data, policy, roles.engines, devices, session.directory.path)
    generation = await open_generation(
        config, roles, prepared.data.renderer, stack, tracker=tracker, prepare_engine=weights.push_to
    )
    plan = build_sampling_plans(config, prepared.stop_token_ids)[1]
    policy_engines = ServedPolicy(run=run, generation=generation, weights=weights, plan=plan, devices=devices)
    return Evaluator(run, policy_engines, draws, plan, config.evaluation, config.alarms)
