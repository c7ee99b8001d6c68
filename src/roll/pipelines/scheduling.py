"""From a configuration to the scheduler and the controller that feed a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from roll.config.pipelines.rlvr import RLVRConfig
from roll.data import Data
from roll.pipelines.learning.selection import doom_of, group_reason
from roll.pipelines.state import RunState
from roll.protocols import Reward
from roll.registry import load_function
from roll.rollout import AsyncController, DataLedger, Feed, LLMProxy, RolloutScheduler, Router, SamplingPlan
from roll.rollout.group_run import Doom
from roll.rollout.loops import Renderer, RolloutLoop
from roll.types import PromptDraw, Rollout

__all__ = ["GREEDY", "build_controller", "build_router", "build_scheduler", "own_loop"]

GREEDY = "greedy"
"""Purpose of the greedy answers that a baseline compares with."""


def build_router(config: RLVRConfig) -> Router:
    """By load; the baseline deals prompts out by turns."""
    scheduling = config.rollout.scheduling
    policy = "round_robin" if scheduling.type == "batch" else "least_loaded"
    return Router(policy, scheduling.max_kv_used)


def build_scheduler(
    config: RLVRConfig,
    proxy: LLMProxy,
    rewards: Mapping[str, Reward],
    renderer: Renderer,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
    *,
    loop: RolloutLoop | None = None,
) -> RolloutScheduler:
    """The scheduler of a run.

    Args:
        config: of the run.
        proxy: where requests go.
        rewards: by domain.
        renderer: tokens to text.
        on_rollout: told of every rollout as it ends.
        loop: in place of the configuration's.

    Raises:
        ConfigError: `rollout.loop` cannot be imported.
    """
    scheduling = config.rollout.scheduling
    return RolloutScheduler(
        proxy,
        rewards,
        renderer,
        seed=config.seed,
        max_attempts=config.rollout.max_attempts,
        retry_wait_s=config.rollout.retry_wait_s,
        replicate=scheduling.replicate_prompts and scheduling.type != "batch",
        loop=own_loop(config) if loop is None else loop,
        on_rollout=on_rollout,
    )


def own_loop(config: RLVRConfig) -> RolloutLoop | None:
    """The user's own way to make a rollout, where there is one.

    Raises:
        ConfigError: it cannot be imported.
    """
    loop = config.rollout.loop
    return cast(RolloutLoop, load_function(loop, "rollout loop")) if loop else None


def build_controller(
    config: RLVRConfig,
    state: RunState,
    data: Data,
    ledger: DataLedger,
    scheduler: RolloutScheduler,
    proxy: LLMProxy,
    plan: SamplingPlan,
) -> AsyncController:
    """The controller of a run, with what an earlier process left in flight."""

    def draw(count: int, domain: str | None) -> Sequence[PromptDraw]:
        drawn = data.train.draw(count, domain)
        ledger.open(drawn, state.step + 1)
        return drawn

    filters = config.algorithm.filters
    ahead = config.rollout.scheduling.async_ratio > 0
    pending = [data.train.again(*entry) for entry in state.pending]
    return AsyncController(
        scheduler,
        proxy,
        config.rollout.scheduling,
        Feed(
            draw=draw,
            plans=_plans(config, plan),
            batch_size=config.rollout.prompts_per_step,
            num_steps=config.training.num_steps - state.step,
            left_out=partial(group_reason, algorithm=config.algorithm, max_new_tokens=config.rollout.max_new_tokens)
            if filters.refill
            else None,
            max_refills=filters.max_refills,
            doomed=_doom(config),
            weights=_weights(config),
            num_dealt=state.step * config.rollout.prompts_per_step + (len(pending) if ahead else 0),
        ),
        version=state.policy_version,
        pending=pending,
    )


def _plans(config: RLVRConfig, plan: SamplingPlan) -> tuple[SamplingPlan, ...]:
    """How groups are sampled, and their greedy answers where the baseline is one."""
    if config.algorithm.advantage.mean != "greedy":
        return (plan,)
    sampling = replace(plan.sampling, temperature=0.0, top_p=1.0, top_k=0)
    return plan, replace(plan, purpose=GREEDY, group_size=1, sampling=sampling)


def _weights(config: RLVRConfig) -> dict[str, float]:
    if not config.rollout.scheduling.domain_quotas:
        return {}
    return {entry.domain or entry.source: entry.weight for entry in config.data}


def _doom(config: RLVRConfig) -> Doom | None:
    scheduling = config.rollout.scheduling
    if not scheduling.stop_doomed_groups or scheduling.reward_range is None:
        return None
    single_turn = all(entry.turns == 1 for entry in config.data)
    return doom_of(config.algorithm, scheduling.reward_range, config.rollout.max_new_tokens, single_turn=single_turn)
