"""What rollouts an algorithm asks for: how they are sampled, which groups pass, and where draws come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from roll.algorithms.selection import doom_of, group_reason
from roll.config.pipelines.rlvr import RLVRConfig
from roll.data import Data
from roll.pipelines.generation import Generation
from roll.pipelines.learning.state import LearningState
from roll.rollout import AsyncController, DataLedger, Feed, SamplingPlan
from roll.rollout.group_run import Doom
from roll.types import PromptDraw

__all__ = ["GREEDY", "build_controller"]

GREEDY = "greedy"
"""Purpose of the greedy answers that a baseline compares with."""


def build_controller(
    config: RLVRConfig, state: LearningState, data: Data, ledger: DataLedger, generation: Generation, plan: SamplingPlan
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
        generation.scheduler,
        generation.proxy,
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
